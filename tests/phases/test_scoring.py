"""Scoring of groups between the engine and the store, in whatever order the verdicts arrive."""

import numpy as np
import pytest

from megarl.data.prompts import Prompt
from megarl.phases.scoring import PendingGroup, Scoring, SeededPrompt
from megarl.recipe.tables import RewardTable
from megarl.rewards.pool import Verdict
from megarl.storage.rollouts import Response


class ScriptedPool:
    """A stand-in for the verifier pool; the test sets its verdicts."""

    def __init__(self):
        self.asked, self.answers = [], []

    def ask(self, prompt, response):
        self.asked.append((prompt.index, response))
        return len(self.asked)

    def verdicts(self, wait=False, unless=lambda: False):
        found, self.answers = self.answers, []
        return found


def response(finish_reason="stop"):
    return Response(np.ones(1, np.int32), np.zeros(1, np.float32), 0.0, finish_reason, 0)


def make(in_order, groups=3, samples=2, **table):
    pool = ScriptedPool()
    scoring = Scoring(pool, RewardTable(kind="exact", **table), in_order, longest=10)
    pending = [PendingGroup(0, SeededPrompt(i, Prompt(i, "", (5,), "", {})), samples) for i in range(groups)]
    return pool, scoring, pending


@pytest.mark.parametrize(("in_order", "first"), [(True, []), (False, [1])])
def test_groups_are_returned_in_order_of_generation_or_of_scoring(in_order, first):
    pool, scoring, pending = make(in_order)
    seen = []
    scoring.on_scored = lambda group: seen.append(group.seeded.number)
    for group in pending[:2]:
        for k in (1, 0):
            scoring.add(group, k, response(), f"{k}")
    scoring.add(pending[2], 0, response(), "0")  # its other response is still being generated
    assert pool.asked == [(0, "1"), (0, "0"), (1, "1"), (1, "0"), (2, "0")]
    assert scoring.take() == []
    pool.answers = [(3, Verdict(1.0)), (4, Verdict(0.0)), (5, Verdict(1.0)), (1, Verdict(0.5))]
    taken = scoring.take()
    assert [group.seeded.number for group in taken] == first == seen
    pool.answers = [(2, Verdict(1.0))]
    taken += scoring.take()
    assert sorted(group.seeded.number for group in taken) == [0, 1]
    rewards = {group.seeded.number: [r.reward for r in group.responses] for group in taken}
    assert rewards == {0: [1.0, 0.0], 1: [0.0, 1.0]}
    assert not pending[2].done and scoring.take() == []


def test_truncated_responses_are_scored_only_without_require_stop():
    pool, scoring, (group, *_) = make(in_order=True)
    scoring.add(group, 0, response("length"), "0")
    scoring.add(group, 1, response("timeout"), "1")
    assert pool.asked == []
    assert [r.reward for r in scoring.take()[0].responses] == [0.0, 0.0]
    pool, scoring, (group, *_) = make(in_order=True, require_stop=False)
    scoring.add(group, 0, response("length"), "0")
    assert pool.asked == [(0, "0")]


def test_responses_whose_verifier_exceeds_a_limit_are_counted_and_logged(capsys):
    pool, scoring, (group, *_) = make(in_order=True)
    scoring.add(group, 0, response(), "0")
    scoring.add(group, 1, response(), "1")
    pool.answers = [(1, Verdict(0.0, "time")), (2, Verdict(1.0))]
    assert [r.reward for r in scoring.take()[0].responses] == [0.0, 1.0]
    assert scoring.over_limit == 1
    assert "response 0 to prompt 0 scores 0" in capsys.readouterr().out
