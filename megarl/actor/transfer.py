"""From the host to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def to_device(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """``array`` as a tensor on ``device``; of a CUDA device by a copy that the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # without it the host waits for the copy
    return tensor.to(device, non_blocking=True)
