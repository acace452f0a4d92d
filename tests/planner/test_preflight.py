"""Machines that preflight refuses, and settings that it remarks on."""

import re
from importlib import metadata

import pytest

from megarl.errors import Note, UserError
from megarl.planner.preflight import check_devices, check_recipe
from megarl.recipe.load import load_recipe
from tests.actor.conftest import make_recipe


def test_a_warm_up_that_is_longer_than_the_run_is_noted(recipe):
    """And a decay, which here is just as long."""
    lengths = ("warmup_updates=13", "schedule=wsd", "decay_updates=12")
    with pytest.warns(Note) as noted:
        check_recipe(load_recipe(recipe, [f"optimizer.{setting}" for setting in lengths]))
    assert [str(one.message) for one in noted] == ["[optimizer] warmup_updates = 13, but the run has 12 updates"]


@pytest.mark.parametrize(
    ("megatron", "declared", "whose", "versions", "refused"),
    [
        ("0.16.1", "<2.12.0,>=2.9.0a0", "{} needs", "<2.12.0,>=2.9.0a0", ("2.6.0", "2.12.0")),
        ("0.19.2", "", "megarl's own choice for {}, which declares none, is", "<2.18,>=2.9", ("2.6.0", "2.18.0")),
    ],
)
def test_transformer_engine_must_suit_megatron_core(megatron, declared, whose, versions, refused, monkeypatch):
    """Megatron-Core declares versions in 0.16.1, but none in 0.19.2."""
    recipe = make_recipe(actor={"backend": "cuda", "layers": "transformer_engine"}, rollout={"engine": "vllm"})
    line = f"transformer-engine[pytorch,core-cu13]{declared}; extra == 'dev'"
    monkeypatch.setattr(metadata, "requires", {"megatron-core": ["numpy", line]}.__getitem__)
    command = f"pip install --no-build-isolation 'transformer-engine[pytorch]{versions}'"
    with pytest.raises(UserError, match=re.escape(f"not installed: {command}")):
        check_devices(recipe)
    said = f"is installed, but {whose.format(f'Megatron-Core {megatron}')} {versions}"
    for version in (*refused, "2.9.0", "2.11.0"):
        installed = {"transformer-engine": version, "megatron-core": megatron}
        monkeypatch.setattr(metadata, "version", installed.__getitem__)
        message = f"version {version} {said}" if version in refused else "needs 1 GPUs, but torch sees 0 here"
        with pytest.raises(UserError, match=re.escape(message)):
            check_devices(recipe)
