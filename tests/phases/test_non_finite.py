"""Updates that are not finite are recorded and skipped, up to ``actor.max_skipped_updates``; then the run stops."""

import math

import pytest

from tests.helpers import megarl, read_lines
from tests.phases.commands import settings, train

MUTANT = "the_second_and_the_fifth_update_are_not_finite"


@pytest.mark.parametrize("allowed", [0, 2])
def test_updates_that_are_not_finite_stop_the_run_or_are_skipped(recipe, tmp_path, allowed):
    small = ("schedule.stages=1", "eval.every=0", "run.rehearse=false", f"actor.max_skipped_updates={allowed}")
    arguments = ("train", recipe, "--run-dir", tmp_path / "run", *settings(*small))
    result = megarl(*arguments, mutant=MUTANT)
    records, updates = (read_lines(tmp_path / "run" / name) for name in ("non_finite.jsonl", "metrics.jsonl"))
    assert {r["tensor"] for r in records} == {"loss"}
    assert all(len(r["logprobs"]) == len(r["response_tokens"]) > 0 for r in records)
    if allowed == 0:
        assert result.returncode != 0
        assert "update 2: " in result.stderr and "loss is not finite" in result.stderr
        assert "non_finite.jsonl" in result.stderr and "max_skipped_updates = 0" in result.stderr
        assert [u["update"] for u in updates] == [1]
        assert {r["update"] for r in records} == {2}
        (saved,) = (tmp_path / "run/stages/000/checkpoints").iterdir()
        assert saved.name == "update_000001"
        megarl(*arguments, "--set", "actor.max_skipped_updates=2", mutant=MUTANT)
        updates = read_lines(tmp_path / "run/metrics.jsonl")
        assert [u["update"] for u in updates] == list(range(1, 1 + len(updates))) and len(updates) > 5
    else:
        assert result.returncode == 0, result.stderr
        assert [u["update"] for u in updates if u.get("skipped_update")] == [2, 5]
        assert all(math.isfinite(u["loss"]) for u in updates if "skipped_update" not in u)
        assert {r["update"] for r in records} == {2, 5}
        # a run that continues from it may skip as many again
        short = settings(*small, "schedule.updates_per_stage=2")
        train(recipe, tmp_path / "next", "--continue-from", tmp_path / "run", *short, mutant=MUTANT)
        assert [bool(u.get("skipped_update")) for u in read_lines(tmp_path / "next/metrics.jsonl")] == [False, True]
