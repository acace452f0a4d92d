"""A new objective takes one file, also where it has statistics and a kind of muting of its own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests import helpers

OBJECTIVE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from megarl.objectives.objective import Objective
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import make_terms


@dataclass(frozen=True)
class MeanLogRatio:
    value: torch.Tensor


@dataclass(frozen=True)
class Quiet(Objective):
    """rho A without the tokens whose ratio is above the batch's mean."""

    statistics_types: ClassVar = (MeanLogRatio,)

    def statistics(self, batch, group=None, backend="torch"):
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        sums = torch.stack([l.double().sum(), batch.loss_mask.sum().double()])
        if group is not None:
            dist.all_reduce(sums, group=group)
        return MeanLogRatio(sums[0] / sums[1].clamp(min=1))

    def terms(self, batch, statistics):
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        loud = l.detach() > statistics.value
        value = torch.where(loud, 0, l.exp() * batch.advantages)
        terms = make_terms(self, batch, -value, ~loud & ~clamped, l, clamped, {})
        return terms.flagged("loud_fraction", loud, batch)
'''
SWEEP = """
recipe = "{recipe}"
stage = 0
seeds = [3]
baseline = "quiet"
[set]
schedule = {{ stages = 1, updates_per_stage = 4 }}
actor = {{ checkpoint_every = 2, keep_checkpoints = 2, statistics_scope = "lagged" }}
[axes.objective]
quiet = {{ objective = {{ path = "quiet.py:Quiet" }} }}
"""


def test_one_file_reaches_training_checkpoints_sweeps_what_if_and_the_report(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(OBJECTIVE)

    def megarl(*arguments: object) -> str:
        done = helpers.megarl(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    (tmp_path / "sweep.toml").write_text(SWEEP.format(recipe=recipe))
    megarl("sweep", "sweep.toml")
    run = tmp_path / "sweep/quiet/seed_3"
    (row,) = (line for line in csv.DictReader((tmp_path / "sweep/runs.csv").open()) if line["update"] == "4")
    assert 0 < float(row["loud_fraction"]) < 1
    megarl("report", run, "--output", "report.html")
    assert '"name": "loud"' in (tmp_path / "report.html").read_text()
    rows = json.loads(megarl("what-if", run, "--stage", 0, "--update", 2, "--batches", 2, "--json"))
    masked = {row["objective"]: row["masked"][0] for row in rows if "masked" in row}
    assert masked.keys() == {"m2po", "trm", "prefix_filter", "cppo", "Quiet"} and masked["Quiet"] > 0
