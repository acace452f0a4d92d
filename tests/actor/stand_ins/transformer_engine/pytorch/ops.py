"""Classes that Megatron-Core names only in annotations."""


class Sequential: ...


class FusibleOperation: ...
