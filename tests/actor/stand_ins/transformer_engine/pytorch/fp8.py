import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False

    @staticmethod
    def is_fp8_calibration():
        return False


def fp8_autocast(*_, **__):
    return contextlib.nullcontext()
