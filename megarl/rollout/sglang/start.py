"""``python start.py MODULE ARGUMENT ...``: as ``python -m MODULE``, but signals that stop a run reach none of it.

SGLang's interpreter runs it, which has no megarl: see `megarl.rollout.signals`, whose file is beside this one's folder.
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
