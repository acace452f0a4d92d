"""Fused operations. Each has a readable torch definition beside its compiled backends, to which tests compare them."""
