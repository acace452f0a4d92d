import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None, **_):
    assert not enabled
    return contextlib.nullcontext()
