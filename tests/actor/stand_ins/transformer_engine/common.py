"""`te.common.recipe`: the ways to scale in fp8; the stand-ins scale a whole tensor at a time in all of them."""

from enum import Enum


class _Recipe:
    def __init__(self, fp8_format=None, **settings):
        self.fp8_format, self.settings = fp8_format, settings


class recipe:
    class Format(Enum):
        E4M3 = 1
        HYBRID = 2

    class DelayedScaling(_Recipe): ...

    class Float8CurrentScaling(_Recipe): ...

    class Float8BlockScaling(_Recipe): ...

    class MXFP8BlockScaling(_Recipe): ...
