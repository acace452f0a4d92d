"""Fused operations, one file each; `megarl.kernels.reference` defines what "correct" means."""
