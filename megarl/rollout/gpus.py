"""Which GPUs belong to whom on a node, as values of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os


def visible_gpus(first: int, count: int) -> str:
    """``count`` of the GPUs that this process sees, from number ``first`` (counted from 0) on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return ",".join(visible.split(",")[first : first + count])
    return ",".join(map(str, range(first, first + count)))


def replica_gpus(count: int) -> str:
    """The ``count`` GPUs of this process' engine replica: replicas divide a node's GPUs in the order of LOCAL_RANK."""
    return visible_gpus(int(os.environ.get("LOCAL_RANK", "0")) * count, count)
