"""Rollout engines: `engine.py` is the contract, every other module the only importer of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserError

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.rollout.engine import RolloutEngine


def build_engine(recipe: Recipe, policy_dir: Path, version: int) -> RolloutEngine:
    """The recipe's engine with the policy of ``policy_dir`` loaded; one replica of it lives in this process."""
    if recipe.rollout.engine == "builtin":
        from megarl.rollout.builtin import BuiltinEngine

        return BuiltinEngine(policy_dir, version)
    raise UserError(f"[rollout] engine = {recipe.rollout.engine!r} is not available in this version; use 'builtin'")
