"""Stands for the package that vLLM brings along. Nothing but an engine may import it: it asks CUDA for all GPUs."""

raise RuntimeError("flashinfer was imported, which initialises CUDA before the process has chosen its GPU")
