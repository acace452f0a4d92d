"""Weight gradients of an expert layer on a GPU: added to the float32 total in one kernel, or by a product and a sum.

Both get what an expert layer of Qwen3-30B-A3B has: 128 experts, the same number of tokens for each on average. The sum
is what Megatron's hook makes of a gradient that autograd returns.

    python benchmarks/weight_gradient.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import NOT_MEASURED, attempt, gpu_milliseconds, write_table

from megarl.kernels.weight_gradient import add_group_products

EXPERTS, SHAPES = 128, {"gate and up": (1536, 2048), "down": (2048, 768)}
TOKENS = (256, 1024, 4096)  # of an expert, in the mean
MEASURED = ("product and sum, ms", "one kernel, ms", "TFLOP/s", "GB/s")


def row(experts: int, tokens: int, outputs: int, inputs: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    ends = torch.rand(experts, generator=generator, device="cuda").add_(0.5).cumsum(0)
    ends = (ends / ends[-1] * (experts * tokens)).to(torch.int32)

    def random(size: int) -> torch.Tensor:
        shape = (experts * tokens, size)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    gradient, rows = random(outputs), random(inputs)
    total = torch.zeros(experts, outputs, inputs, device="cuda")

    def product_and_sum() -> None:
        total.add_(F.grouped_mm(gradient.t(), rows, offs=ends))

    def one_kernel() -> None:
        add_group_products(total, gradient, rows, ends)

    ways = {"product and sum, ms": product_and_sum, "one kernel, ms": one_kernel}
    found, failed = attempt({name: partial(gpu_milliseconds, way) for name, way in ways.items()})
    result = {name: found.get(name, "failed") for name in ways}
    if "one kernel, ms" in found:
        seconds = found["one kernel, ms"] / 1e3
        result["TFLOP/s"] = 2 * experts * tokens * outputs * inputs / seconds / 1e12
        result["GB/s"] = (8 * total.numel() + 2 * gradient.numel() + 2 * rows.numel()) / seconds / 1e9
    return result | {"note": "; ".join(failed.values())}


def rows(experts: int = EXPERTS, tokens: tuple[int, ...] = TOKENS) -> Iterator[dict[str, Any]]:
    for name, shape in SHAPES.items():
        for each in tokens:
            facts = {"weight": name, "experts": experts, "tokens of an expert": each}
            if torch.cuda.is_available():
                yield facts | row(experts, each, *shape)
            else:
                yield facts | dict.fromkeys(MEASURED, NOT_MEASURED) | {"note": "no GPU"}


if __name__ == "__main__":
    write_table("weight_gradient_gpu", list(rows()))
