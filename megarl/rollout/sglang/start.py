"""``python start.py MODULE ARGUMENT ...``: as ``python -m MODULE``, but with the signals that stop a run blocked.

It runs in SGLang's interpreter, which cannot import megarl, so it runs the file of `megarl.rollout.signals` by path.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    kept_from_children = runpy.run_path(str(Path(__file__).parents[1] / "signals.py"))["kept_from_children"]
    sys.argv = sys.argv[1:]
    sys.path[0] = ""  # as with -m
    with kept_from_children():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
