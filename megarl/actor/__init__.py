"""The training side: the only package that imports megatron.core."""
