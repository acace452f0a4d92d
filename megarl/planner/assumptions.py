"""Assumptions of a plan about GPUs, storage and responses, which are in no recipe; each is an option of that name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from megarl.errors import UserError

GIB = 2**30
WITHIN = 1.8  # the factor, either way, within which estimates of hours agree with figures that others published
UNITS = {1.0: "", GIB: "GiB", 1e9: "GB/s"}  # of options


def _number(value: float, of: str, unit: float = 1.0, most: float = math.inf) -> Any:
    return field(default=value, metadata={"of": of, "unit": unit, "most": most})


@dataclass(frozen=True)
class Assumptions:
    """Bytes, seconds and shares, each with its meaning; every number computed from them is an estimate.

    0 for mfu and hbm: the model's kind or the kind of GPU decides, see `megarl.planner.plan.Plan.assumed`.
    """

    mean_prompt: float = _number(0.25, "of data.max_prompt_tokens", most=1.0)
    mean_response: float = _number(0.5, "of rollout.max_response_tokens", most=1.0)
    expert_imbalance: float = _number(1.25, "tokens of the fullest expert rank over the mean")
    hbm: float = _number(0.0, "of a GPU that a process can allocate; else as the vendor's cards have it", GIB)
    runtime_memory: float = _number(4 * GIB, "CUDA context, NCCL and kernel workspaces", GIB)
    fragmentation: float = _number(0.05, "of a GPU that the allocator cannot use", most=1.0)
    engine_memory: float = _number(6 * GIB, "activations, logits and CUDA graphs of a rollout engine", GIB)
    mfu: float = _number(0.0, "of the GPU's bf16 peak, in an update; else 0.35, with experts 0.15", most=1.0)
    engine_start: float = _number(120, "seconds: imports, compilation and CUDA graphs of a rollout engine")
    decode_efficiency: float = _number(0.5, "of memory bandwidth or of the peak, in decoding", most=1.0)
    storage: float = _number(2e9, "bytes a second to shared storage, all nodes together", 1e9)


def assume(given: dict[str, Any]) -> Assumptions:
    """The assumptions with the values of the options that are given; `UserError` for a value out of range.

    given: {option: its value in `UNITS`, or None}; others than the assumptions are left alone.
    """
    values = {}
    for item in fields(Assumptions):
        if (value := given.get(item.name)) is None:
            continue
        if not 0 < value <= item.metadata["most"]:
            option = f"--{item.name.replace('_', '-')}"
            raise UserError(f"{option} {value:g}: expected more than 0, and at most {item.metadata['most']:g}")
        values[item.name] = value * item.metadata["unit"]
    return Assumptions(**values)
