"""Stages that make several passes over their groups, and branches that train them in batches of another size."""

import pytest

from megarl.views.audit import audit
from tests.helpers import read_lines
from tests.phases.commands import settings, succeed, train


@pytest.fixture(scope="module")
def twice(recipe, tmp_path_factory):
    """A run of one stage with two passes of three updates."""
    run = tmp_path_factory.mktemp("twice") / "run"
    train(recipe, run, *settings("schedule.stages=1", "schedule.passes=2", "eval.every=0"))
    return run


def test_every_pass_trains_the_same_batches_in_the_same_order(twice):
    updates = read_lines(twice / "metrics.jsonl")
    assert [(line["pass"], line["staleness"]) for line in updates] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    of_groups = [[line[key] for key in ("reward/mean", "tokens", "trained_tokens")] for line in updates]
    assert of_groups[:3] == of_groups[3:] and len(set(map(tuple, of_groups[:3]))) == 3
    found = audit(twice, 1000)
    assert found.problems == []
    (row,) = found.stages
    assert (row.generated, row.trained, row.pending, row.updates) == (12, 12, 0, 6)
    assert row.trained_tokens == row.tokens > 0


def test_a_branch_trains_the_same_rollouts_in_batches_of_another_size(twice, tmp_path):
    """By two pipeline stages. 12 groups would fill 6 updates of 2 groups; the setting asks for 5."""
    branch = tmp_path / "branch"
    changes = ("schedule.prompts_per_update=2", "schedule.passes=1", "schedule.updates_per_stage=5")
    ranks = ("actor.processes_per_node=2", "actor.pipeline_parallel=2")
    succeed("optimize", twice, "--stage", "0", "--output", branch, *settings(*changes, *ranks))
    once, updates = read_lines(twice / "metrics.jsonl")[:3], read_lines(branch / "metrics.jsonl")
    assert [line["staleness"] for line in updates] == list(range(5)) and "pass" not in updates[0]
    # two updates of the branch train the groups of one update of the origin
    for key, mean in (("reward/mean", True), ("tokens", False)):
        pairs = [updates[2 * i][key] + updates[2 * i + 1][key] for i in range(2)]
        assert [pair / 2 if mean else pair for pair in pairs] == pytest.approx([line[key] for line in once[:2]])
    assert audit(branch, 1000).problems == []
