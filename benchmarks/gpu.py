"""All benchmarks of single kernels on a GPU: its ceilings, the token pass, batch statistics, the lm head.

    python benchmarks/gpu.py [--tokens 1048576 16777216] [--repeats 20]

Kernels are compared with the speed at which this GPU copies and multiplies in the same run. Without a GPU every figure
is "not measured".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import linear_logprob
import selection
import token_pass
import torch
from common import NOT_MEASURED, write_table

DEVICE = torch.device("cuda")
BACKENDS = ["cuda", "triton"]
FEW = 3  # repeats of what takes a second
COMPILED = 1 << 20  # the most tokens for which torch.compile is measured: it takes half a second for sixteen times more
LOOP_TOKENS = 1 << 16  # the most tokens for which the released loops run, which wait for the device in every step


def ceilings() -> list[dict[str, Any]]:
    rows = [
        ("copy of 4 GiB, GB/s read and written", linear_logprob.copy_ceiling, 1e9),
        ("bfloat16 product of 8192 x 8192, TFLOP/s", linear_logprob.matmul_ceiling, 1e12),
    ]
    found = torch.cuda.is_available()
    return [{"ceiling": name, "value": run() / unit if found else NOT_MEASURED} for name, run, unit in rows]


def pass_rows(sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    cases = [(size, name) for size in sizes for name in token_pass.CASES]
    if not torch.cuda.is_available():
        columns = [f"{way} ms" for way in ("torch", *BACKENDS, "compile")]
        columns += [f"{backend} share of copy bandwidth" for backend in BACKENDS]
        yield from ({"objective": name, "tokens": size} | dict.fromkeys(columns, NOT_MEASURED) for size, name in cases)
        return
    for size, name in cases:
        few = repeats if size <= 1 << 20 else FEW
        yield token_pass.measure(name, size, DEVICE, BACKENDS, few, compile=size <= COMPILED)


def selection_rows(sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of batch statistics; the backend triton uses torch's for them."""
    cases = [(name, size) for name in ("m2po", "bapo") for size in sizes]
    if not torch.cuda.is_available():
        columns = ("torch ms", "cuda ms", "sort + cumsum ms")
        yield from ({"statistics": name, "tokens": size} | dict.fromkeys(columns, NOT_MEASURED) for name, size in cases)
        return
    for name, size in cases:
        loop = size <= LOOP_TOKENS
        yield selection.measure(name, size, DEVICE, ["cuda"], FEW if loop else repeats, loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 20, 1 << 24])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    write_table("ceilings_gpu", ceilings())
    write_table("token_pass_gpu", list(pass_rows(arguments.tokens, arguments.repeats)))
    write_table("selection_gpu", list(selection_rows([LOOP_TOKENS, *arguments.tokens], arguments.repeats)))
    write_table("linear_logprob_gpu", list(linear_logprob.gpu_rows()))


if __name__ == "__main__":
    main()
