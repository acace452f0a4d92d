"""Updates that are not finite are recorded and skipped, up to ``actor.max_skipped_updates``; then the run stops."""

import math

import numpy as np
import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.storage.run_dir import RunDir
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
    run = RunDir.create(tmp_path_factory.mktemp("poisoned"), load_recipe(recipe))
    info = copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.stage(0).policy)
    rng, groups = np.random.default_rng(0), []
    for group_id in run.stage(0).groups:
        reward = 1e6 if group_id in (4 * 1 + 2, 4 * 4) else 1.0
        tokens = [rng.integers(3, 20, 4).astype(np.int32) for _ in range(4)]
        logprobs = np.full(4, -2, np.float32)
        responses = [Response(t, logprobs, reward * (i == 0), "stop", 0) for i, t in enumerate(tokens)]
        groups.append(Group(group_id, np.array([3, 4], np.int32), tuple(responses)))
    writer = RolloutWriter(run.stage(0).rollouts, weights_hash=info.weights_hash, logprob_mode="exact")
    writer.append(groups)
    writer.close()
    seal(run.stage(0).rollouts, run.stage(0).groups)
    return run


@pytest.mark.parametrize("allowed", [0, 2])
def test_updates_that_are_not_finite_stop_the_run_or_are_skipped(poisoned, tmp_path, allowed):
    (tmp_path / "steep.py").write_text(STEEP)
    settings = [f"actor.max_skipped_updates={allowed}", "objective.advantage=group_mean"]
    settings = [word for text in (*settings, f"objective.path={tmp_path}/steep.py:Steep") for word in ("--set", text)]
    result = megarl("optimize", poisoned.root, "--stage", "0", "--output", tmp_path / "run", *settings)
    records, updates = (read_lines(tmp_path / "run" / name) for name in ("non_finite.jsonl", "metrics.jsonl"))
    assert {r["tensor"] for r in records} == {"loss"}
    assert all(len(r["logprobs"]) == len(r["response_tokens"]) == 4 for r in records)
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
