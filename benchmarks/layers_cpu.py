"""Parts of a layer on the CPU, forward and backward, in megarl's C++ and in torch: RMSNorm, attention of short pieces.

    python benchmarks/layers_cpu.py [--threads 1] [--repeats 20]

Both run in one process and take turns; the least time counts. Attention: as many sequences of one length, each of which
attends to itself, as make 1024 tokens; torch's is one batched call, the best that `PackedAttention._by_size` can have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
import torch.nn.functional as F
from token_pass import take_turns

from megarl.kernels.rms_norm import rms_norm
from megarl.kernels.short_attention import short_attention

TOKENS = 1024
CPU = torch.device("cpu")
MODELS = {  # (hidden size, heads, heads of keys and values, width of a head)
    "quickstart": (64, 4, 2, 32),
    "SmolLM2-135M": (576, 9, 3, 64),
    "Qwen3-30B-A3B": (2048, 32, 4, 128),
}


def passes(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], Any]:
    """A forward and a backward pass."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    gradient = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def batched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int) -> torch.Tensor:
    q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(query.shape)


def in_cpp(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return short_attention(query, key, value, None, None, None, offsets, offsets, query.shape[-1] ** -0.5)


def rows(repeats: int) -> list[dict[str, Any]]:
    found = []
    for model, (hidden, heads, kv_heads, width) in MODELS.items():
        x, weight = torch.randn(TOKENS, hidden), torch.randn(hidden)
        norms = {b: passes(partial(rms_norm, eps=1e-6, backend=b), x, weight) for b in ("torch", "cpp")}
        found.append(row("RMSNorm", model, "", take_turns(norms, repeats, CPU)))
        for length in (8, 16, 32, 64):
            qkv = [torch.randn(TOKENS, n, width) for n in (heads, kv_heads, kv_heads)]
            offsets = torch.arange(0, TOKENS + 1, length, dtype=torch.int32)
            ways = {
                "torch": passes(partial(batched, length=length), *qkv),
                "cpp": passes(partial(in_cpp, offsets=offsets), *qkv),
            }
            found.append(row("attention", model, length, take_turns(ways, repeats, CPU)))
    return found


def row(part: str, model: str, length: int | str, seconds: dict[str, float]) -> dict[str, Any]:
    milliseconds = {f"{name} ms": 1e3 * value for name, value in seconds.items()}
    return {
        "part": part,
        "sizes of": model,
        "tokens": TOKENS,
        "tokens of a sequence": length,
        **milliseconds,
        "torch/cpp": seconds["torch"] / seconds["cpp"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    common.write_table("layers_cpu", rows(common.parse_with_threads(parser).repeats))


if __name__ == "__main__":
    main()
