"""Updates that are not finite are recorded and skipped, up to ``actor.max_skipped_updates``; then the run stops."""

import math

import pytest

from tests.commands.stages.made_up import make_run
from tests.helpers import megarl, read_lines

STEEP = """
from dataclasses import dataclass

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, exp, rule
from megarl.objectives import Objective


@rule()
def steep(t, s):
    value = t.ratio * t.advantage * exp(t.advantage * t.advantage * 1e-4)
    return Outcome(value, value, ~t.never, t.never, t.never)


@dataclass(frozen=True)
class Steep(Objective):
    def rule(self, statistics):
        return Rule(steep, ())
"""


@pytest.fixture(scope="module")
def poisoned(recipe, tmp_path_factory):
    """A run with a sealed stage in which update 2 and update 5 have a reward that the objective does not bear."""
    large = {4 * 1 + 2: 1e6, 4 * 4: 1e6}
    return make_run(recipe, tmp_path_factory.mktemp("poisoned"), "schedule.updates_per_stage=6", largest=large)


@pytest.mark.parametrize("allowed", [0, 2])
def test_updates_that_are_not_finite_stop_the_run_or_are_skipped(poisoned, tmp_path, allowed):
    (tmp_path / "steep.py").write_text(STEEP)
    settings = [f"actor.max_skipped_updates={allowed}", "objective.advantage=group_mean"]
    settings = [word for text in (*settings, f"objective.path={tmp_path}/steep.py:Steep") for word in ("--set", text)]
    result = megarl("optimize", poisoned.root, "--stage", "0", "--output", tmp_path / "run", *settings)
    records, updates = (read_lines(tmp_path / "run" / name) for name in ("non_finite.jsonl", "metrics.jsonl"))
    assert {r["tensor"] for r in records} == {"loss"}
    assert all(len(r["logprobs"]) == len(r["response_tokens"]) > 0 for r in records)
    if allowed == 0:
        assert result.returncode != 0
        assert "update 2: " in result.stderr and "loss is not finite" in result.stderr
        assert "non_finite.jsonl" in result.stderr and "max_skipped_updates = 0" in result.stderr
        assert [u["update"] for u in updates] == [1]
        assert {r["update"] for r in records} == {2}
    else:
        assert result.returncode == 0, result.stderr
        assert [u["update"] for u in updates if u.get("skipped_update")] == [2, 5]
        assert all(math.isfinite(u["loss"]) for u in updates if "skipped_update" not in u)
        assert {r["update"] for r in records} == {2, 5}
