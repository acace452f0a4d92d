"""`te.common.recipe`: the class from which Megatron derives one of its own, which megarl does not use."""


class recipe:
    class DelayedScaling: ...
