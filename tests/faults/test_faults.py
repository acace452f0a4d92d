"""A few faults of ``python -m tests.faults``, with every kind of outcome."""

import re
import subprocess
import sys

import pytest

from tests.extent import few
from tests.helpers import ROOT

pytestmark = pytest.mark.crash

ALL = (
    "live: .*distcp: one bit flipped",  # continues from the checkpoint before
    "all checkpoints of the stage",  # continues from the beginning of the stage
    "the stage before damaged too",  # reported
    "^metrics.jsonl: emptied",  # restored from the copy in a checkpoint
    "metrics and their copy",
    "policy/config.json: one bit",
    "rows appended",
    "remedy",
    r"ledger.jsonl, call 2: half",
    r"open manifest.json",
)
ALIKE = ("remedy", "policy/config.json: one bit", "rows appended", r"open manifest.json")
SOME = few(ALL, *(kind for kind in ALL if kind not in ALIKE))


def test_damage_is_repaired_or_reported():
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", "|".join(SOME)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    found = re.search(r"(\d+) faults, 0 wrong", result.stdout)
    assert found and int(found[1]) >= len(SOME), result.stdout
