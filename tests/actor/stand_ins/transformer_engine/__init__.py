"""Transformer Engine 2.6 in plain torch: the parameter names and signatures that Megatron-Core 0.16.1 relies on.

Only for tests, on any device. The names are those of transformer_engine/pytorch/module/{linear,layernorm_linear,
grouped_linear}.py, attention/dot_product_attention and permutation.py. Signatures and names of parameters were compared
with those of the tag v2.6; v2.18 has the same arguments and more.
"""

__version__ = "2.6.0"

from transformer_engine import common, pytorch  # noqa: F401
