"""Reinforcement-learning objectives: one short file per paper, pure tensor functions of a packed batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megarl.errors import UserError, nearest
from megarl.objectives.bapo import Bapo
from megarl.objectives.cispo import Cispo
from megarl.objectives.dapo import Dapo
from megarl.objectives.dcpo import Dcpo
from megarl.objectives.decoupled_ppo import DecoupledPpo
from megarl.objectives.dppo import Dppo
from megarl.objectives.full_prefix import FullPrefix
from megarl.objectives.gppo import Gppo
from megarl.objectives.grpo import Grpo
from megarl.objectives.gspo import Gspo
from megarl.objectives.m2po import M2Po
from megarl.objectives.minpro import MinPro
from megarl.objectives.mu_grpo import MuGrpo
from megarl.objectives.objective import Objective
from megarl.objectives.options import OPTIONS, WithOptions, name_of
from megarl.objectives.padded import PaddedTerms, padded_terms
from megarl.objectives.parts.aggregation import denominator, token_weights
from megarl.objectives.parts.fields import build
from megarl.objectives.parts.metrics import Metric
from megarl.objectives.parts.summary import summarise
from megarl.objectives.parts.terms import Terms
from megarl.objectives.prefix_filter import PrefixFilter
from megarl.objectives.prefix_ratio_grpo import PrefixRatioGrpo
from megarl.objectives.reinforce import Reinforce
from megarl.objectives.sapo import Sapo
from megarl.objectives.topr import Topr
from megarl.objectives.trm import Trm
from megarl.objectives.vespo import Vespo

__all__ = [
    "OBJECTIVES",
    "OPTIONS",
    "Metric",
    "Objective",
    "PaddedTerms",
    "Terms",
    "WithOptions",
    "build_objective",
    "denominator",
    "padded_terms",
    "resolved_fields",
    "summarise",
    "token_weights",
]

OBJECTIVES: dict[str, type[Objective]] = {
    "grpo": Grpo,
    "dapo": Dapo,
    "gppo": Gppo,
    "dcpo": Dcpo,
    "gspo": Gspo,
    "sapo": Sapo,
    "dppo": Dppo,
    "vespo": Vespo,
    "trm": Trm,
    "cispo": Cispo,
    "m2po": M2Po,
    "mu_grpo": MuGrpo,
    "minpro": MinPro,
    "prefix_ratio_grpo": PrefixRatioGrpo,
    "full_prefix": FullPrefix,
    "prefix_filter": PrefixFilter,
    "bapo": Bapo,
    "topr": Topr,
    "decoupled_ppo": DecoupledPpo,
    "reinforce": Reinforce,
}


def build_objective(name: str, fields: dict[str, Any]) -> Objective | WithOptions:
    """The objective of a recipe's ``[objective]`` table; its sub-tables (such as ``[objective.kl]``) are `OPTIONS`.

    Raises `UserError` for an unknown name, field, type or value, with the nearest known one or the allowed range.
    """
    if name not in OBJECTIVES:
        close = nearest(name, OBJECTIVES)
        hint = f"did you mean {close!r}? " if close else ""
        raise UserError(f"objective.name is {name!r}; {hint}known objectives: {', '.join(OBJECTIVES)}")
    own = {key: value for key, value in fields.items() if key not in OPTIONS}
    objective: Objective = build(OBJECTIVES[name], own, f"objective {name!r}", also=tuple(OPTIONS))
    options = []
    for key, option in OPTIONS.items():
        if key in fields:
            if not isinstance(fields[key], dict):
                raise UserError(f"objective.{key} is {fields[key]!r}; expected a table, for example [objective.{key}]")
            options.append(build(option, fields[key], f"objective.{key}"))
    return WithOptions(objective, tuple(options)) if options else objective


def resolved_fields(objective: Objective | WithOptions) -> dict[str, Any]:
    """All fields of an objective and its options, defaults included, in the form that `build_objective` takes."""
    if isinstance(objective, WithOptions):
        return asdict(objective.objective) | {name_of(o): asdict(o) for o in objective.options}
    return asdict(objective)
