"""Scoring of groups between the engine and the store, in whatever order the verdicts arrive."""

import numpy as np
import pytest

from megarl.data.prompts import Prompt
from megarl.phases.scoring import PendingGroup, Scoring
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score
from megarl.storage.rollouts import Response


class ScriptedPool:
    """A stand-in for the verifier pool; the test sets its verdicts."""

    def __init__(self):
        self.asked, self.answers = [], []

    def ask(self, prompt, response):
        self.asked.append((prompt.index, response))
        return [len(self.asked)]

    def verdicts(self, wait=False, unless=lambda: False):
        found, self.answers = self.answers, []
        return found


def response(token, finish_reason="stop"):
    return Response(np.full(1, token, np.int32), np.zeros(1, np.float32), 0.0, finish_reason, 0)


def make(in_order, groups=3, samples=2, **table):
    pool = ScriptedPool()
    scoring = Scoring(pool, RewardTable(kind="exact", **table), lambda tokens: str(tokens[0]), in_order, longest=10)
    pending = [PendingGroup(i, Prompt(i, "", (5,), "", {}), samples) for i in range(groups)]
    return pool, scoring, pending


@pytest.mark.parametrize(("in_order", "first"), [(True, []), (False, [1])])
def test_groups_are_returned_in_order_of_generation_or_of_scoring(in_order, first):
    pool, scoring, pending = make(in_order)
    for group in pending[:2]:
        for k in (1, 0):
            scoring.add(group, k, response(k))
    scoring.add(pending[2], 0, response(0))  # its other response is still being generated
    assert pool.asked == [(0, "1"), (0, "0"), (1, "1"), (1, "0"), (2, "0")]
    assert scoring.take() == []
    pool.answers = [(3, Score(1.0)), (4, Score(0.0)), (5, Score(1.0)), (1, Score(0.5))]
    taken = scoring.take()
    assert [group.group_id for group in taken] == first
    pool.answers = [(2, Score(1.0))]
    taken += scoring.take()
    assert sorted(group.group_id for group in taken) == [0, 1]
    rewards = {group.group_id: [r.reward for r in group.responses] for group in taken}
    assert rewards == {0: [1.0, 0.0], 1: [0.0, 1.0]}
    assert not pending[2].complete and scoring.take() == []


def test_truncated_responses_are_scored_only_without_require_stop():
    pool, scoring, (group, *_) = make(in_order=True)
    scoring.add(group, 0, response(0, "length"))
    scoring.add(group, 1, response(1, "timeout"))
    assert pool.asked == []
    assert [r.reward for r in scoring.take()[0].responses] == [0.0, 0.0]
    pool, scoring, (group, *_) = make(in_order=True, require_stop=False)
    scoring.add(group, 0, response(0, "length"))
    assert pool.asked == [(0, "0")]


def test_responses_whose_verifier_exceeds_a_limit_are_counted_and_logged(capsys):
    pool, scoring, (group, *_) = make(in_order=True)
    scoring.add(group, 0, response(0))
    scoring.add(group, 1, response(1))
    pool.answers = [(1, Score(0.0, "time")), (2, Score(1.0))]
    assert [r.reward for r in scoring.take()[0].responses] == [0.0, 1.0]
    assert scoring.over_limit == 1
    assert "response 0 to prompt 0 scores 0" in capsys.readouterr().err
