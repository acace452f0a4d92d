"""Rollout engines: `engine.py` is the contract, every other module the only importer of its engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.rollout.engine import RolloutEngine


AVAILABLE = ("builtin",)


def build_engine(recipe: Recipe, stage: int, policy_dir: Path, version: int) -> RolloutEngine:
    """The engine of a stage with the policy of ``policy_dir`` loaded; one replica of it lives in this process."""
    engine = recipe.rollout_of(stage).engine
    assert engine in AVAILABLE, "preflight lets no other pass"
    from megarl.rollout.builtin import BuiltinEngine

    device = "cpu" if recipe.actor.backend == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"
    return BuiltinEngine(policy_dir, version, device)
