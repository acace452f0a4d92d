"""Fused operations. Each has a readable definition in torch, with which tests compare its compiled backends."""
