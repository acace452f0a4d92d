"""Divides the GPUs of a node among processes, as values of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os


def visible_gpus(first: int, count: int) -> str:
    """``count`` consecutive GPUs of those that this process sees, starting with number ``first`` (from 0)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return ",".join(visible.split(",")[first : first + count])
    return ",".join(map(str, range(first, first + count)))


def replica_gpus(count: int) -> str:
    """The ``count`` GPUs of this process' engine replica: a node's GPUs go to its replicas in order of LOCAL_RANK."""
    return visible_gpus(int(os.environ.get("LOCAL_RANK", "0")) * count, count)
