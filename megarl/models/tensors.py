"""Describes which Hugging Face tensors make up a Megatron parameter; `megarl.actor.hf_names` cuts the parameters so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LM_HEAD = "lm_head.weight"

TRANSPOSED = ("columns", "alternate_columns")  # values of `TensorNames.packing` with a transposed parameter


@dataclass(frozen=True)
class TensorNames:
    """The Hugging Face tensors that make up one Megatron parameter.

    names: in their order in the parameter; those of a layer without ``model.layers.N.``, those of an expert with "{}"
        for its number; NAME[FIRST:END:ROWS] are the rows from FIRST to before END of a tensor that has ROWS.
    split: the dimension of each tensor that tensor parallelism splits; None: replicated on every rank.
    packing: how the tensors are arranged in the parameter.
        "rows": they have the same number of rows and are concatenated.
        "columns": the parameter is one tensor, transposed.
        "alternate_columns": as "columns", and the tensor's columns come alternately from the parameter's two halves;
        where a shape is needed, the tensor's last dimension appears as (outputs, 2).
        "groups": the first ``group[i]`` rows of each tensor i, then the next ones, and so on.
        "gated_groups": as "groups", for queries, keys and values; each head of the first tensor, of ``group[1]`` rows,
        is followed by the gate of its output, and in the parameter a group's gates follow its queries.
    """

    names: tuple[str, ...]
    split: int | None = None
    packing: Literal["rows", "groups", "gated_groups", "columns", "alternate_columns"] = "rows"
    group: tuple[int, ...] = ()


def gate_up(prefix: str) -> TensorNames:
    """Gate and up projection, which are one parameter in Megatron. prefix: the Hugging Face module."""
    return TensorNames((f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), 0)


def down(prefix: str) -> TensorNames:
    """The down projection. prefix: the Hugging Face module."""
    return TensorNames((f"{prefix}.down_proj.weight",), 1)
