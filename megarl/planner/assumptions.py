"""Assumptions of a plan about GPUs, storage and responses, which are in no recipe, and the options that set them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from megarl.errors import UserError

GIB = 2**30
WITHIN = 1.7  # the factor, either way, within which estimates of hours agree with figures that others published


def _number(value: float, of: str, unit: float = 1.0, least: float = 0.0, most: float = math.inf) -> Any:
    said = f"at least {least:g}" if least else "above 0" if most == math.inf else f"above 0 and up to {most:g}"
    return field(default=value, metadata={"of": of, "unit": unit, "least": least, "most": most, "range": said})


@dataclass(frozen=True)
class Assumptions:
    """Bytes, seconds and shares, each with its meaning; every number computed from them is an estimate."""

    mean_prompt: float = _number(0.25, "of data.max_prompt_tokens", most=1.0)
    mean_response: float = _number(0.5, "of rollout.max_response_tokens", most=1.0)
    expert_imbalance: float = _number(1.25, "tokens of the fullest expert rank over the mean", least=1.0)
    runtime_bytes: float = _number(4 * GIB, "CUDA context, NCCL and kernel workspaces", GIB)
    fragmentation: float = _number(0.05, "of a GPU that the allocator cannot use", most=1.0)
    engine_bytes: float = _number(6 * GIB, "activations and CUDA graphs of a rollout engine", GIB)
    mfu_dense: float = _number(0.35, "of the GPU's bf16 peak, in an update of a dense model", most=1.0)
    mfu_experts: float = _number(0.15, "of the GPU's bf16 peak, in an update of a model with experts", most=1.0)
    engine_start: float = _number(120, "seconds: imports, compilation and CUDA graphs of a rollout engine")
    decode_efficiency: float = _number(0.5, "of memory bandwidth or of the peak, in decoding", most=1.0)
    host_bandwidth: float = _number(300e9, "bytes a second that all cores of a node read and write in Adam", 1e9)
    link: float = _number(25e9, "bytes a second between a GPU and its host, each way", 1e9)
    storage: float = _number(2e9, "bytes a second to shared storage, all nodes together", 1e9)


_FIELDS = {item.name: item for item in fields(Assumptions)}
# option: the assumptions that it sets
OPTIONS = {"mfu": ("mfu_dense", "mfu_experts")} | {
    name.replace("_bytes", "_memory"): (name,) for name in _FIELDS if not name.startswith("mfu_")
}
UNITS = {GIB: "GiB", 1e9: "GB/s"}


def unit_of(option: str) -> str:
    """Unit of an option's value: "GiB" or "GB/s"; "" for a share or a plain number."""
    return UNITS.get(_FIELDS[OPTIONS[option][0]].metadata["unit"], "")


def meaning_of(option: str) -> str:
    return " / ".join(_FIELDS[name].metadata["of"] for name in OPTIONS[option])


def assume(given: dict[str, float | None]) -> Assumptions:
    """The assumptions with the values of the options that are given; `UserError` for a value out of range."""
    values = {}
    for option, value in given.items():
        if value is None:
            continue
        for name in OPTIONS[option]:
            rule = _FIELDS[name].metadata
            if not (rule["least"] <= value <= rule["most"] and 0 < value < math.inf):
                said = f"{value:g} {unit_of(option)}".strip()
                raise UserError(f"--{option.replace('_', '-')} {said}: {rule['of']}; {rule['range']}")
            values[name] = value * rule["unit"]
    return Assumptions(**values)
