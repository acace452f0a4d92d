"""Memory and time of the fused lm head on a CPU beside materialised logits: `benchmarks/linear_logprob.py`, made small.

The small problem keeps the full one's proportion of chunk to logits, 441 of 4096 tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/linear_logprob.py"


def measure(head: str) -> dict[str, float]:
    child = dict(head=head, tokens=2048, width=64, vocabulary=32768, repeats=3, chunk_tokens=220)
    command = [sys.executable, str(SCRIPT), "--child", json.dumps(child)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def test_a_tenth_of_the_memory_in_about_the_time_of_materialised_logits() -> None:
    fused, materialised = measure("megarl torch"), measure("materialised")
    assert fused["peak_mib"] <= materialised["peak_mib"] / 10, (fused, materialised)
    assert fused["cpu_seconds"] <= 1.3 * materialised["cpu_seconds"], (fused, materialised)
