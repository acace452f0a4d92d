"""Rollout engines. `engine.py` defines their contract; only an engine's own module imports that engine's package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast

from megarl.errors import UserError
from megarl.recipe.names import ENGINES
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import EngineModule, RolloutEngine, section


def engine_module(name: str) -> EngineModule:
    """Import and return the module of the engine ``name``; this does not yet import the engine's own package."""
    return cast(EngineModule, importlib.import_module(ENGINES[name].module))


def build_engine(
    recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool = False
) -> RolloutEngine:
    """Start one replica of the stage's engine, in or owned by this process, and load the policy of ``policy_dir``.

    version: the policy version that completions report. routed_experts: record the experts each token was routed to.
    """
    return engine_module(recipe.rollout_of(stage).engine).build(recipe, stage, policy_dir, version, routed_experts)


def check_engine(recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
    """Raise `UserError` if the engine of a stage is not installed or cannot do what the recipe asks of it.

    hf: the model's configuration, as `read_hf_config` returns it.
    """
    name = recipe.rollout_of(stage).engine
    module = engine_module(name)
    backend = recipe.actor.backend
    if recipe.actor.trains_recorded_experts and backend not in module.RECORDS_EXPERTS:
        recording = [repr(other) for other in ENGINES if backend in engine_module(other).RECORDS_EXPERTS]
        raise UserError(
            f'[actor] routing_replay = "engine" needs an engine that records routed experts in every stage, but '
            f"{section(recipe, stage)} engine = {name!r} of stage {stage} records none with backend = {backend!r}: "
            f"use {' or '.join(recording)} there, or set "
            'routing_replay = "actor" or "none"'
        )
    module.check(recipe, stage, hf)
