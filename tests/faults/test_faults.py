"""A few of the faults of ``make faults``, of each kind of outcome."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.crash

SOME = "|".join(
    (
        "distcp: one bit flipped",  # the checkpoint before it
        "all checkpoints of the stage",  # the stage's beginning
        "the stage before damaged too",  # named
        "metrics.jsonl: emptied",  # restored
        "metrics and their copy",
        "policy/config.json: one bit",
        "rows appended",
        "remedy",
        r"ledger.jsonl, call 2: half",
        r"open manifest.json",
    )
)


def test_damage_is_mended_or_named():
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", SOME]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "16 faults, 0 wrong" in result.stdout, result.stdout
