"""What megarl assumes of CUDA, torch and the kernel. Each probe has a fork of its own: one that hangs is an answer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.rehearsal.forks import in_fork

SECONDS = 20


def allocator(late: bool) -> bool:
    """Whether memory is in expandable segments, if the variable is set before CUDA begins or, ``late``, after it."""
    if late:
        torch.zeros(1, device="cuda")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    held = torch.empty(1 << 28, device="cuda")
    return all(segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot() if held.numel())


def device_works(late: bool) -> bool:
    """Whether a device can be used that CUDA_VISIBLE_DEVICES hides before CUDA begins or, ``late``, after it."""
    if late:
        torch.cuda.init()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return torch.zeros(1, device="cuda").numel() == 1
    except (RuntimeError, AssertionError):
        return False


def forks_share_pinned_memory() -> list[bool]:
    """Whether a fork sees what its parent writes to pinned memory later, and whether an upload by the parent does."""
    pinned = torch.zeros(1 << 20, pin_memory=True)
    (reader, writer), (seen, tell) = os.pipe(), os.pipe()
    if not os.fork():
        os.read(reader, 1)
        os.write(tell, bytes([int(pinned.numpy().all())]))
        os._exit(0)
    pinned.fill_(1)
    uploaded = bool(pinned.to("cuda", non_blocking=True).all())
    os.write(writer, b"1")
    return [os.read(seen, 1) == b"\1", uploaded]


def fill_free_memory_with_nan() -> None:
    """So that what a kernel leaves unwritten, or reads beside its input, shows."""
    held = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 24, *[1 << 18] * 64, *[1 << 8] * 512)]
    del held


PROBES: dict[str, Callable[[], Any]] = {
    "expandable segments, set before CUDA begins": partial(allocator, late=False),
    "expandable segments, set after it": partial(allocator, late=True),
    "a device works that was hidden before CUDA began": partial(device_works, late=False),
    "a device works that was hidden after it": partial(device_works, late=True),
    "a fork shares pinned memory with its parent, and uploads have what the parent wrote": forks_share_pinned_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="on a simulated device, which has no allocator")
    small, failed = parser.parse_args().small, False
    for name, probe in PROBES.items():
        if small and name.startswith("expandable"):
            continue
        try:
            print(f"{name}: {in_fork(probe, SECONDS)}", flush=True)
        except AssertionError as error:
            failed = True
            print(f"{name}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
