"""The lm head (log-prob and entropy of a token, forward and backward), fused and with materialised logits.

On the CPU the fused op is compared with log_softmax over materialised logits by peak memory and time, each in a
separate process. `gpu.py` measures it on a GPU for shards of Qwen3's vocabulary, beside Liger and CCE if they are
installed.

    python benchmarks/linear_logprob.py [--tokens 4096 --width 512 --vocabulary 151936] [--repeats 2]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import NOT_MEASURED, attempt, gpu_milliseconds, in_own_process, launches_and_syncs, write_table

from megarl.kernels.linear_logprob import linear_logprob

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # hidden, weight, targets -> log-probs

QWEN3 = dict(tokens=32768, width=2048, vocabulary=151936)


def materialised(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def fused(backend: str, chunk_tokens: int | None = None) -> Head:
    return lambda *inputs: linear_logprob(*inputs, chunk_tokens=chunk_tokens, backend=backend)[0]


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probs by Liger; it also computes the entropy, in bfloat16."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, 1.0, -100, 1, True)[0]


def cut_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probs by CCE; no entropy, no temperature. Its gradient filter is off, so that it is exact."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


HEADS: dict[str, Head] = {
    "megarl torch": fused("torch"),
    "megarl triton": fused("triton"),
    "materialised": materialised,
    "liger": liger,
    "cut_cross_entropy": cut_cross_entropy,
}


def problem(
    tokens: int, width: int, vocabulary: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(vocabulary, width, generator=generator, device=device, dtype=dtype).mul_(width**-0.5)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


# Matrix products of a forward and backward pass: the logits, two gradients, and the logits once more in methods that do
# not keep them (also Liger 0.8 and CCE). Each method is credited with the products that it makes.
PRODUCTS = dict.fromkeys(HEADS, 4) | {"materialised": 3}


def operations(head: str, tokens: int, width: int, vocabulary: int) -> tuple[int, int]:
    """Floating-point operations of a head's matrix products: (forward, forward and backward)."""
    product = 2 * tokens * width * vocabulary
    return product, PRODUCTS[head] * product


def traffic(tokens: int, width: int, vocabulary: int, size: int) -> tuple[int, int]:
    """Bytes that a fused op must read and write: (forward, forward and backward). size: bytes of an element."""
    inputs = (tokens + vocabulary) * width * size + tokens * 8
    outputs = tokens * 2 * 4
    return inputs + outputs, 2 * (inputs + outputs) + (tokens + vocabulary) * width * size


# CPU


def cpu_child(
    head: str, tokens: int, width: int, vocabulary: int, repeats: int, chunk_tokens: int | None
) -> dict[str, float]:
    """Least wall and CPU seconds of forward + backward, and growth of peak memory in MiB; runs in its own process."""
    run = fused("torch", chunk_tokens) if head == "megarl torch" else HEADS[head]
    hidden, weight, targets = problem(tokens, width, vocabulary, "cpu", torch.float32)
    run(hidden[:1], weight[:64], targets[:1] % 64).sum().backward()  # loads the libraries first
    hidden.grad = weight.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        run(hidden, weight, targets).sum().backward()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        hidden.grad = weight.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(wall), "cpu_seconds": min(cpu), "peak_mib": (peak - before) / 1024}


def cpu_rows(
    tokens: int, width: int, vocabulary: int, repeats: int, chunk_tokens: int | None, threads: int
) -> list[dict[str, Any]]:
    """Rows of the fused and the materialised head, and of their ratios."""
    size = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
    rows = []
    for head in ("megarl torch", "materialised"):
        child = json.dumps(dict(head=head, repeats=repeats, chunk_tokens=chunk_tokens, **size))
        measured = in_own_process(__file__, ["--child", child], threads)
        floats = operations(head, tokens, width, vocabulary)[1]
        rows.append(
            {"op": head, **size, "threads": threads, **measured, "gflop_per_s": floats / measured["seconds"] / 1e9}
        )
    ratios = {key: rows[0][key] / rows[1][key] for key in ("seconds", "cpu_seconds", "peak_mib")}
    return [*rows, {"op": "megarl / materialised", **size, "threads": threads, **ratios, "gflop_per_s": ""}]


# GPU


def matmul_ceiling(size: int = 8192) -> float:
    """Floating-point operations per second of cuBLAS on square bfloat16 matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / gpu_milliseconds(lambda: a @ b, 20) * 1e3


def copy_ceiling(elements: int = 2**30) -> float:
    """Bytes per second, read and written, of a copy of 4 GiB."""
    source = torch.empty(elements, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * elements / gpu_milliseconds(lambda: target.copy_(source), 20) * 1e3


def gpu_row(head: str, shape: dict[str, int], flops: float, bytes_per_second: float) -> dict[str, Any]:
    hidden, weight, targets = problem(**shape, device="cuda", dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return HEADS[head](hidden, weight, targets)

    def both() -> None:
        HEADS[head](hidden, weight, targets).sum().backward()
        hidden.grad = weight.grad = None

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
    for name, run, floats, moved in zip(
        ("forward", "both"), (forward, both), operations(head, **shape), traffic(**shape, size=2), strict=True
    ):
        time_ms = gpu_milliseconds(run)
        roofline = max(floats / flops, moved / bytes_per_second) * 1e3
        row |= {f"{name}_ms": time_ms, f"{name}_tflops": floats / time_ms / 1e9, f"{name}_of_roof": roofline / time_ms}
    row["launches"], row["host_syncs"] = launches_and_syncs(both)
    return row


MEASURED = ("peak_mib", "forward_ms", "forward_tflops", "forward_of_roof", "both_ms", "both_tflops", "both_of_roof")


def gpu_rows() -> Iterator[dict[str, Any]]:
    """Every head on one shard of the vocabulary for each tensor-parallel size, without the two all-reduces."""
    available = torch.cuda.is_available()
    flops, copied = (matmul_ceiling(), copy_ceiling()) if available else (0.0, 0.0)
    for tp in (1, 2, 4, 8):
        shape = QWEN3 | {"vocabulary": QWEN3["vocabulary"] // tp}
        for head in HEADS:
            row = {"op": head, **shape, "tp": tp, "gflop": operations(head, **shape)[1] // 10**9}
            row |= {"megabytes": traffic(**shape, size=2)[1] // 10**6}
            row |= {"matmul_tflops": flops / 1e12, "copy_gb_s": copied / 1e9} if available else {}
            row |= dict.fromkeys((*MEASURED, "launches", "host_syncs"), NOT_MEASURED)
            row["note"] = "" if available else "no GPU"
            if available:
                found, failed = attempt({head: partial(gpu_row, head, shape, flops, copied)})
                row |= found.get(head, {"note": failed.get(head)})
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, help="tokens of a chunk of the fused op; default: its own choice")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(cpu_child(**options.child)))
        return
    shape = (options.tokens, options.width, options.vocabulary, options.repeats, options.chunk_tokens)
    write_table("linear_logprob_cpu", [row for threads in options.threads for row in cpu_rows(*shape, threads)])


if __name__ == "__main__":
    main()
