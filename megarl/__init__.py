"""Reinforcement learning of Mixture-of-Experts language models on very stale rollouts, on Megatron-Core."""

import sys
from pathlib import Path

__version__ = "0.1.0"


def compiled_file(name: str) -> Path | None:
    """Path of a compiled file of the package, None if it is not installed.

    It is searched for beside every entry of ``sys.path``, because in a clone the sources are imported from there and
    the compiled files are installed.
    """
    return next((path for entry in sys.path if (path := Path(entry, "megarl", name)).exists()), None)
