"""Reinforcement-learning objectives: one short file per paper, pure tensor functions of a packed batch."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from typing import Any

from megarl.errors import UserError, did_you_mean
from megarl.objectives.objective import Objective
from megarl.objectives.options import OPTIONS, WithOptions, frozen_logprobs, name_of, updates_per_step
from megarl.objectives.own import load_objective
from megarl.objectives.padded import padded_statistics, padded_terms
from megarl.objectives.parts.aggregation import denominator, token_weights
from megarl.objectives.parts.fields import build
from megarl.objectives.parts.metrics import Metric
from megarl.objectives.parts.summary import summarise
from megarl.objectives.parts.terms import Terms, make_terms
from megarl.own_file import is_own

__all__ = [
    "OBJECTIVES",
    "OPTIONS",
    "Metric",
    "Objective",
    "Terms",
    "WithOptions",
    "build_objective",
    "denominator",
    "frozen_logprobs",
    "make_terms",
    "objective_class",
    "padded_statistics",
    "padded_terms",
    "resolved_fields",
    "summarise",
    "token_weights",
    "updates_per_step",
]

MODULES = (
    "grpo",
    "dapo",
    "gppo",
    "dcpo",
    "gspo",
    "sapo",
    "dppo",
    "vespo",
    "trm",
    "cispo",
    "m2po",
    "mu_grpo",
    "minpro",
    "prefix_ratio_grpo",
    "full_prefix",
    "prefix_filter",
    "bapo",
    "topr",
    "decoupled_ppo",
    "reinforce",
    "cppo",
    "ctpo",
    "drpo",
    "oapl",
)


def _defined_in(module: str) -> type[Objective]:
    """The one objective that a module of this package defines."""
    path = f"{__name__}.{module}"
    names = vars(import_module(path)).values()
    return next(x for x in names if isinstance(x, type) and issubclass(x, Objective) and x.__module__ == path)


OBJECTIVES: dict[str, type[Objective]] = {name: _defined_in(name) for name in MODULES}


def objective_class(name: str) -> type[Objective]:
    """The class of an objective: ``name`` is one of `OBJECTIVES`, or FILE.py:CLASS; `UserError` if there is none."""
    if is_own(name):
        return load_objective(name)
    if name not in OBJECTIVES:
        raise UserError(f"objective.name is {name!r}; {did_you_mean(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def build_objective(name: str, fields: dict[str, Any]) -> Objective:
    """The objective of a recipe's ``[objective]`` table; its sub-tables (such as ``[objective.kl]``) are `OPTIONS`.

    name: see `objective_class`. Raises `UserError` also for an unknown field, type or value, with the nearest known one
    or the allowed range.
    """
    own = {key: value for key, value in fields.items() if key not in OPTIONS}
    objective: Objective = build(objective_class(name), own, f"objective {name!r}", also=tuple(OPTIONS))
    options = []
    for key, option in OPTIONS.items():
        if key in fields:
            if not isinstance(fields[key], dict):
                raise UserError(f"objective.{key} is {fields[key]!r}; expected a table, for example [objective.{key}]")
            options.append(build(option, fields[key], f"objective.{key}"))
    return WithOptions(objective=objective, options=tuple(options)) if options else objective


def resolved_fields(objective: Objective) -> dict[str, Any]:
    """All fields of an objective and its options, defaults included, in the form that `build_objective` takes."""
    if isinstance(objective, WithOptions):
        return asdict(objective.objective) | {name_of(o): asdict(o) for o in objective.options}
    return asdict(objective)
