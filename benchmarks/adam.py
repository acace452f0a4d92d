"""A step of AdamW: on the GPU fused and one tensor at a time, on the host fused by number of threads.

    python benchmarks/adam.py [--parameters 50000000] [--threads 1 4 16]

The host's step is what `actor.offload_optimizer` waits for. Bytes are those that a step must move for a parameter: it
reads four floats and writes three.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import NOT_MEASURED, gpu_milliseconds, write_table

BYTES = 7 * 4
PIECE = 1 << 20  # parameters of a tensor


def optimizer(parameters: int, device: str, **options: bool) -> torch.optim.AdamW:
    tensors = [torch.randn(min(PIECE, parameters), device=device) for _ in range(max(1, parameters // PIECE))]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    return torch.optim.AdamW(tensors, **options)


def row(where: str, parameters: int, milliseconds: float | str) -> dict[str, Any]:
    rate = BYTES * parameters / milliseconds / 1e6 if isinstance(milliseconds, float) else NOT_MEASURED
    return {"AdamW": where, "parameters": parameters, "ms": milliseconds, "GB/s": rate}


def gpu_rows(parameters: int) -> Iterator[dict[str, Any]]:
    for name, options in {"GPU, fused": {"fused": True}, "GPU, foreach": {"foreach": True}}.items():
        found = torch.cuda.is_available()
        ms = gpu_milliseconds(optimizer(parameters, "cuda", **options).step) if found else NOT_MEASURED
        yield row(name, parameters, ms)


def host_rows(parameters: int, threads: list[int]) -> Iterator[dict[str, Any]]:
    adam = optimizer(parameters, "cpu", fused=True)
    adam.step()
    for number in threads:
        torch.set_num_threads(number)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            adam.step()
            seconds.append(time.perf_counter() - start)
        yield row(f"host, {number} of {os.cpu_count()} threads", parameters, 1e3 * min(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    parameters, threads = options.parameters, options.threads
    write_table("adam", [*gpu_rows(parameters), *host_rows(parameters, threads)])


if __name__ == "__main__":
    main()
