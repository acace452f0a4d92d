"""Memory of a GPU in which what no kernel has written shows."""

from __future__ import annotations

import torch


def fill_free_memory_with_nan() -> None:
    """So that what a kernel leaves unwritten, or reads beside its input, shows."""
    held = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 24, *[1 << 18] * 64, *[1 << 8] * 512)]
    del held
