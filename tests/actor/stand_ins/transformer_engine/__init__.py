"""Transformer Engine in plain torch, on any device: what Megatron-Core 0.16.1 relies on, for tests alone.

In the oldest and the newest version that Megatron-Core declares; the variable ``TE_STAND_IN`` chooses. Names and
arguments are those of its tags: ``python tools/te_stand_ins.py CLONE`` compares them.
"""

import os

__version__ = os.environ.get("TE_STAND_IN", "2.11.0")
assert __version__ in ("2.9.0", "2.11.0")

from transformer_engine import common, pytorch  # noqa: E402, F401
