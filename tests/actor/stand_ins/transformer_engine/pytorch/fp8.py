import contextlib

import torch


class FP8GlobalStateManager:
    enabled = False
    products = 0  # number of products in 8 bits
    rounded_to = torch.float8_e4m3fn

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @staticmethod
    def is_fp8_calibration():
        return False


@contextlib.contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None, **_):
    before, FP8GlobalStateManager.enabled = FP8GlobalStateManager.enabled, enabled
    yield
    FP8GlobalStateManager.enabled = before


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    assert not enabled  # weights are never stored in 8 bits
    yield
