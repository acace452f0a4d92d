"""Which Hugging Face tensors make a Megatron parameter, as data: `megarl.actor.hf_names` cuts the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LM_HEAD = "lm_head.weight"

TRANSPOSED = ("columns", "alternate_columns")  # of `TensorNames.packing`


@dataclass(frozen=True)
class TensorNames:
    """The Hugging Face tensors of which one Megatron parameter is made.

    names: in their order in the parameter; those of a layer without ``model.layers.N.``, those of an expert with "{}"
        for its number, a part of a tensor as `rows_of` names it.
    split: the dimension of each tensor that tensor parallelism splits; None: every rank has all of it.
    packing: "rows": the tensors have equally many rows and stand one below another. "query_groups": query, key and
        value of the first group of query heads, then those of the next. "gated_query_groups": the same, and each head
        of the first tensor is a query and the gate of its output; in the parameter a group's gates follow its queries.
        "columns": one tensor, the parameter transposed. "alternate_columns": the same, and its columns are those of the
        parameter's two halves by turns; (outputs, 2) stand for its last dimension wherever a shape is asked for.
        "groups": the first ``group[i]`` rows of each tensor i one below another, then the next, and so on.
    """

    names: tuple[str, ...]
    split: int | None = None
    packing: Literal["rows", "groups", "query_groups", "gated_query_groups", "columns", "alternate_columns"] = "rows"
    group: tuple[int, ...] = ()


def rows_of(name: str, first: int, end: int, rows: int) -> str:
    """The name of rows ``first`` to ``end`` of a tensor that has ``rows`` of them."""
    return f"{name}[{first}:{end}:{rows}]"


def gate_up(prefix: str) -> TensorNames:
    """The first matrix of a SwiGLU."""
    return TensorNames((f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), 0)


def down(prefix: str) -> TensorNames:
    """The second matrix of a SwiGLU."""
    return TensorNames((f"{prefix}.down_proj.weight",), 1)
