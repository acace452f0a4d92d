"""The rules of live schedules, in a simulation of a trainer and engines at random speeds."""

import random

import pytest

from megarl.recipe.schedule import LagRule, cut_chunks
from megarl.recipe.tables import ScheduleTable


def simulate(rule, updates, chunk, workers, seed):
    """[(batch, version)] of every batch.

    Each step makes a random one of the possible moves: the trainer makes an update, or a worker takes the next chunk or
    generates the one that it has. A batch is one group.
    """
    rng = random.Random(seed)
    todo = cut_chunks(range(updates), rule.sync_every, chunk, rule.before_first_cut)
    stored, holding, taken, done, newest = {}, [None] * workers, 0, 0, 0
    while done < updates:
        moves = [("train", 0)] if done in stored else []
        for worker, part in enumerate(holding):
            if part is None and taken < len(todo):
                moves.append(("take", worker))
            elif part is not None and rule.version(part[-1], newest) is not None:
                moves.append(("generate", worker))
        assert moves, "a deadlock"
        move, worker = rng.choice(moves)
        if move == "train":
            done += 1
            newest = done if rule.is_published(done) else newest
        elif move == "take":
            holding[worker], taken = todo[taken], taken + 1
        else:
            version = rule.version(holding[worker][-1], newest)
            assert version <= newest
            stored |= dict.fromkeys(holding[worker], version)
            holding[worker] = None
    return sorted(stored.items())


@pytest.mark.parametrize(("workers", "chunk"), [(1, 64), (3, 1), (3, 5)])
@pytest.mark.parametrize("sync_every", [1, 8])
def test_free_running_stays_within_max_lag_and_never_deadlocks(sync_every, chunk, workers):
    for max_lag in (sync_every - 1, sync_every, 2 * sync_every, 64):
        trained = simulate(LagRule(sync_every, max_lag), 96, chunk, workers, seed=0)
        assert [batch for batch, _ in trained] == list(range(96))
        assert all(0 <= batch - version <= max_lag for batch, version in trained)
        assert all(version % sync_every == 0 for _, version in trained)
    assert max(batch - version for batch, version in trained) >= sync_every  # engines do run ahead where they may


def test_chunks_are_cut_at_every_new_version():
    assert cut_chunks(range(8, 24), 6, 4) == [range(8, 12), range(12, 14), range(14, 18), range(18, 20), range(20, 24)]
    assert cut_chunks(range(10), 100, 4) == [range(4), range(4, 8), range(8, 10)]
    assert cut_chunks(range(10), 4, 3, first=2) == [range(2), range(2, 5), range(5, 6), range(6, 9), range(9, 10)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["needs sync_every"]),
        ({"sync_every": 4}, ["needs max_lag"]),
        ({"sync_every": 5, "max_lag": 8}, ["does not divide", "nearest divisor is 4", "stages = 1"]),
        ({"sync_every": 8, "max_lag": 6}, ["could never be generated", "at least 7", "at most 7"]),
        ({"sync_every": 4, "lockstep": True, "max_lag": 2}, ["lockstep", "0 to 3", "at least 3"]),
        ({"sync_every": 4, "lockstep": True, "partial": True}, ["need a single version per batch"]),
        ({"sync_every": 4, "max_lag": 8, "partial": True, "colocate": True}, ["never updates weights during generat"]),
        ({"kind": "staged", "sync_every": 4}, ["sync_every", 'kind = "live"']),
        ({"kind": "staged", "passes": 5}, ["updates of all passes", "nearest divisor is 4"]),
        ({"sync_every": 4, "max_lag": 3, "passes": 2}, ["needs lockstep or delay"]),
        ({"sync_every": 4, "lockstep": True, "passes": 3}, ["does not divide sync_every = 4", "nearest divisor is 2"]),
    ],
)
def test_contradictory_schedules_are_refused_with_a_remedy(settings, words):
    with pytest.raises(ValueError, match="(?s)" + ".*".join(words)):
        ScheduleTable(**{"kind": "live", "updates_per_stage": 96} | settings)


def test_passes_of_a_live_run_repeat_what_one_version_generated():
    schedule = ScheduleTable(kind="live", updates_per_stage=8, sync_every=4, lockstep=True, passes=2)
    assert [schedule.batch_of(update) for update in range(8)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)
    ]  # fmt: skip
    assert [schedule.first_update_of(batch) for batch in range(4)] == [0, 1, 4, 5]
    staged = ScheduleTable(updates_per_stage=6, passes=3)
    assert [staged.batch_of(update) for update in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_lag_rules_of_lockstep_delay_and_max_lag():
    def rule(**settings):
        return ScheduleTable(kind="live", updates_per_stage=96, sync_every=4, **settings).lag_rule

    assert rule(lockstep=True) == LagRule(4, 3, 0)
    assert rule(delay=2) == LagRule(4, 11, 2)
    assert rule(delay=2, max_lag=20) == LagRule(4, 20, 2)
    assert rule(max_lag=3) == LagRule(4, 3, None)
    short = ScheduleTable(kind="live", stages=1, updates_per_stage=12, sync_every=10, max_lag=11)
    simulate(short.lag_rule, 12, chunk=4, workers=2, seed=0)  # its last interval is short
