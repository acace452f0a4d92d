import contextlib

import torch


class CudaRNGStatesTracker:
    def __init__(self):
        self.states_ = {}


def checkpoint(
    function, *args, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None, **kwargs
):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def is_fp8_activation_recompute_enabled():
    return False


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    return contextlib.nullcontext()
