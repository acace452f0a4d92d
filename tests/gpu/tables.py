"""Measures one table of `benchmarks/` on this machine's GPU and writes it to a folder, again after each row."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.gpu.steps import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import actor_gpu
import adam
import gpu
import linear_logprob
import selection
import token_pass
import weight_gradient
from common import write_csv, write_table

Row = dict[str, object]
TOKENS, SMALL_TOKENS = [1 << 20, 1 << 24], 1 << 9
REPEATS = 20
SMALL_HEAD = {"tokens": 64, "width": 64, "vocabulary": 512}
QWEN3_MOE = "Qwen3-30B-A3B, 2 layers"
WAYS = ["torch, triton", "torch, torch", "torch, triton, recompute"]
GROUPS = {name: model for name, model in actor_gpu.MODELS.items() if name.endswith("groups of 8")}
GROUP_WAYS = ["torch, triton", "torch, triton, a prompt for each response"]


def actor_rows() -> Iterator[Row]:
    yield from actor_gpu.rows({QWEN3_MOE: actor_gpu.MODELS[QWEN3_MOE]}, WAYS)
    yield from actor_gpu.rows(GROUPS, GROUP_WAYS)


def adam_rows(parameters: int, threads: list[int]) -> Iterator[Row]:
    yield from adam.gpu_rows(parameters)
    yield from adam.host_rows(parameters, threads)


# name: (rows on a GPU, rows of a rehearsal)
TABLES: dict[str, tuple[Callable[[], Iterable[Row]], Callable[[], Iterable[Row]]]] = {
    "ceilings": (
        gpu.ceilings,
        lambda: [{"copy": linear_logprob.copy_ceiling(1 << 10), "product": linear_logprob.matmul_ceiling(64)}],
    ),
    "token_pass": (
        lambda: gpu.pass_rows(TOKENS, REPEATS),
        lambda: [token_pass.measure("gspo", SMALL_TOKENS, gpu.DEVICE, ["cuda"], 1)],
    ),
    "selection": (
        lambda: gpu.selection_rows([gpu.LOOP_TOKENS, *TOKENS], REPEATS),
        lambda: [selection.measure(name, SMALL_TOKENS, gpu.DEVICE, ["cuda"], 1, True) for name in ("m2po", "bapo")],
    ),
    "linear_logprob": (
        linear_logprob.gpu_rows,
        lambda: [linear_logprob.gpu_row(head, SMALL_HEAD, 1e12, 1e12) for head in ("megarl torch", "materialised")],
    ),
    "actor_gpu": (
        actor_rows,
        lambda: actor_gpu.rows(actor_gpu.TINY, ["torch, cuda", "transformer_engine, triton"], side=64),
    ),
    "operators": (
        lambda: actor_gpu.operator_rows(*actor_gpu.MODELS[QWEN3_MOE]),
        lambda: actor_gpu.operator_rows(*actor_gpu.TINY["tiny"]),
    ),
    "weight_gradient": (weight_gradient.rows, lambda: [weight_gradient.row(2, 8, 16, 32)]),
    "adam": (lambda: adam_rows(50_000_000, [1, 4, 16]), lambda: adam_rows(1000, [1])),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    name, rows = f"{options.table.removesuffix('_gpu')}_gpu", []
    for row in TABLES[options.table][options.small]():
        # a backend that fails is an error in a rehearsal, and on a GPU only a cell of the table
        assert not (options.small and row.get("failed")), row
        rows.append(row)
        write_csv(name, rows, options.out)
    write_table(name, rows, options.out)


if __name__ == "__main__":
    main()
