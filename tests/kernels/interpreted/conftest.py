"""These tests run in Triton's interpreter, in a process of their own: see `tests/kernels/test_interpreted.py`."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
