"""`te.common.recipe`, whose fp8 recipes the stand-ins never use."""


class recipe:
    class DelayedScaling: ...
