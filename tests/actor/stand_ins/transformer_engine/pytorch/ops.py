"""Only named in annotations."""


class Sequential: ...


class FusibleOperation: ...
