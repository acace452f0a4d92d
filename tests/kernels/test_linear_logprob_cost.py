"""Memory of the fused lm head on a CPU, relative to materialised logits, by `benchmarks/linear_logprob.py`.

The sizes are small, but a chunk has the same share of the tokens as in the full benchmark, 441 of 4096.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/linear_logprob.py"


def measure(head: str) -> dict[str, float]:
    child = dict(head=head, tokens=2048, width=64, vocabulary=32768, repeats=1, chunk_tokens=220)
    command = [sys.executable, str(SCRIPT), "--child", json.dumps(child)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def test_fused_head_needs_a_tenth_of_the_memory() -> None:
    fused, materialised = measure("megarl torch"), measure("materialised")
    assert fused["peak_mib"] <= materialised["peak_mib"] / 10, (fused, materialised)
