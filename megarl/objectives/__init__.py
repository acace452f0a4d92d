"""Reinforcement-learning objectives: one short file a paper, pure tensor functions of a packed batch."""

from __future__ import annotations

import difflib
from typing import Any

from megarl.errors import UserError
from megarl.objectives.aggregation import denominator, token_weights
from megarl.objectives.fields import build
from megarl.objectives.grpo import Grpo
from megarl.objectives.mu_grpo import MuGrpo
from megarl.objectives.reinforce import Reinforce
from megarl.objectives.terms import Metric, Objective, Terms

__all__ = ["OBJECTIVES", "Metric", "Objective", "Terms", "build_objective", "denominator", "token_weights"]

OBJECTIVES: dict[str, type[Objective]] = {
    "grpo": Grpo,
    "mu_grpo": MuGrpo,
    "reinforce": Reinforce,
}


def build_objective(name: str, fields: dict[str, Any]) -> Objective:
    """The objective of a recipe's ``[objective]`` table; `UserError` names a wrong name, field, type or value."""
    if name not in OBJECTIVES:
        close = difflib.get_close_matches(name, OBJECTIVES, 1, 0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"objective.name is {name!r}; {hint}known objectives: {', '.join(OBJECTIVES)}")
    return build(OBJECTIVES[name], fields, f"objective {name!r}")
