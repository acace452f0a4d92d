"""A few faults of ``python -m tests.faults``, with every kind of outcome."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.crash

SOME = "|".join(
    (
        "distcp: one bit flipped",  # continues from the checkpoint before
        "all checkpoints of the stage",  # continues from the beginning of the stage
        "the stage before damaged too",  # reported
        "metrics.jsonl: emptied",  # restored from the copy in a checkpoint
        "metrics and their copy",
        "policy/config.json: one bit",
        "rows appended",
        "remedy",
        r"ledger.jsonl, call 2: half",
        r"open manifest.json",
    )
)


def test_damage_is_repaired_or_reported():
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", SOME]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "16 faults, 0 wrong" in result.stdout, result.stdout
