"""Machines that preflight refuses."""

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
