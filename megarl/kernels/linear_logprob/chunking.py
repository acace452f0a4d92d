"""How many tokens' logits exist at a time; shared by the operation and its backends."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_BUFFER_BYTES = 256 * 2**20


def buffer_bytes(device: torch.device) -> int:
    """Bytes that the logits of a chunk may take: on a GPU a 64th of its memory (2.2 GB of 141), enough for efficient
    matrix products."""
    return torch.cuda.get_device_properties(device).total_memory // 64 if device.type == "cuda" else CPU_BUFFER_BYTES


def chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Slices of at most ``chunk_tokens`` that cover ``tokens``."""
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, start + chunk_tokens)
