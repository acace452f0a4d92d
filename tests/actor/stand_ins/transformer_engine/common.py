"""`te.common.recipe`: nothing here is ever in fp8."""


class recipe:
    class DelayedScaling: ...
