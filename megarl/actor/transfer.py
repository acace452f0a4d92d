"""Copies arrays from the host to the device without making the host wait."""

from __future__ import annotations

import numpy as np
import torch


def to_device(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """``array`` as a tensor on ``device``; to a CUDA device the copy is asynchronous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from other memory the host would wait for the copy
    return tensor.to(device, non_blocking=True)
