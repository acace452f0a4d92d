"""These tests run in Triton's interpreter, in a process of their own: see `tests/kernels/test_interpreted.py`."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1] / "objectives")]  # batches, and the cases they are tested with
