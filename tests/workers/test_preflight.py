"""Machines that preflight refuses."""

from importlib import metadata

import pytest

from megarl.errors import UserError
from megarl.kernels import library
from megarl.workers.preflight import check_devices
from tests.actor.conftest import make_recipe


def test_the_builtin_engine_needs_tritons_compiler_on_gpus(monkeypatch):
    """torch 2.13 runs a Triton kernel for it even with kernels = "torch". Other engines pass on to the next check."""

    monkeypatch.setattr(library, "triton_lacks", lambda: "triton needs a C compiler when it runs")
    actor = {"backend": "cuda", "kernels": "torch"}
    with pytest.raises(UserError, match="on GPUs torch runs a Triton kernel for it, but triton needs a C compiler"):
        check_devices(make_recipe(actor=actor))
    with pytest.raises(UserError, match="needs 1 GPUs, but torch sees 0 here"):
        check_devices(make_recipe(actor=actor, rollout={"engine": "vllm"}))


def test_transformer_engine_must_be_of_a_version_that_megatron_core_declares(monkeypatch):
    """Megatron-Core 0.16.1 declares 2.9 to 2.11."""
    recipe = make_recipe(actor={"backend": "cuda", "layers": "transformer_engine"}, rollout={"engine": "vllm"})
    with pytest.raises(UserError, match=r"not installed: pip install 'transformer-engine\[pytorch\]<2.12.0,>=2.9.0a0'"):
        check_devices(recipe)
    installed = metadata.version
    for version, message in (
        ("2.6.0", "version 2.6.0 is installed, but Megatron-Core 0.16.1 is made for <2.12.0,>=2.9.0a0"),
        ("2.12.0", "version 2.12.0 is installed"),
        ("2.11.0", "needs 1 GPUs, but torch sees 0 here"),
    ):
        versions = {"transformer-engine": version, "megatron-core": installed("megatron-core")}
        monkeypatch.setattr(metadata, "version", versions.__getitem__)
        with pytest.raises(UserError, match=message):
            check_devices(recipe)


def test_a_recipe_of_an_earlier_run_has_torch_layers():
    assert make_recipe(actor={"layers": "auto"}).actor.layers == "torch"
