"""Tests that run in Triton's interpreter, in processes that `tests/kernels/test_interpreted.py` starts."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
