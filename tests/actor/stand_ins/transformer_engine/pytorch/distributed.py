import contextlib

import torch


class CudaRNGStatesTracker:
    def __init__(self):
        self.states_ = {}


def checkpoint(function, *args, **kwargs):
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def is_fp8_activation_recompute_enabled():
    return False


class activation_recompute_forward(contextlib.nullcontext):
    def __init__(self, activation_recompute=False, recompute_phase=False):
        super().__init__()
