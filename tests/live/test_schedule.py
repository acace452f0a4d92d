"""The arithmetic of live schedules against a brute-force simulation of trainer and engines at random speeds."""

import random
from collections import Counter

import pytest

from megarl.errors import UserError
from megarl.recipe.schedule import LagRule, cut_chunks, nearest_divisor
from megarl.recipe.tables import ScheduleTable


def simulate(rule, updates, chunk, workers, seed):
    """[(batch, version)] of every batch, or None when nobody can go on.

    In each step a random party that can do something does it: a worker takes the next chunk, generates the one it has,
    or the trainer makes an update. Batches of one group each.
    """
    rng = random.Random(seed)
    todo = cut_chunks(range(updates), rule.sync_every, chunk)
    stored, holding, taken, done, newest = {}, [None] * workers, 0, 0, 0
    while done < updates:
        moves = [("train", 0)] if done in stored else []
        for worker, part in enumerate(holding):
            if part is None and taken < len(todo):
                moves.append(("take", worker))
            elif part is not None and rule.version(part[-1], newest) is not None:
                moves.append(("generate", worker))
        if not moves:
            return None
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("sync_every", [1, 3, 4, 8])
def test_free_running_keeps_within_the_lag_and_never_stops(sync_every, chunk, workers, seed):
    for max_lag in (sync_every - 1, sync_every, 2 * sync_every, 16, 64):
        if max_lag < sync_every - 1:
            continue
        trained = simulate(LagRule(sync_every, max_lag), 96, chunk, workers, seed)
        assert [batch for batch, _ in trained] == list(range(96))
        assert all(0 <= batch - version <= max_lag for batch, version in trained)
        assert all(version % sync_every == 0 for _, version in trained)
    assert max(batch - version for batch, version in trained) >= sync_every  # it does run ahead where it may


@pytest.mark.parametrize("sync_every", [1, 3, 4])
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_delay_gives_exactly_the_lags_of_the_buffer(sync_every, delay):
    u, n = sync_every, delay
    for seed in range(3):
        trained = simulate(LagRule(u, (n + 1) * u - 1, n), 24 * u, chunk=2, workers=2, seed=seed)
        lags = [batch - version for batch, version in trained]
        warm_up = n * u
        assert lags[:warm_up] == list(range(warm_up))  # all of them by the first policy
        assert Counter(lags[warm_up:]) == dict.fromkeys(range(n * u, (n + 1) * u), 24 - n)


def test_a_lag_that_would_wait_for_ever_is_refused_and_does():
    for u in (2, 4, 7):
        with pytest.raises(ValueError, match=f"at least {u - 1}, or sync_every to at most {u - 1}"):
            LagRule(u, u - 2)
        blind = object.__new__(LagRule)
        for name, value in {"sync_every": u, "max_lag": u - 2, "delay": None}.items():
            object.__setattr__(blind, name, value)
        assert simulate(blind, 96, chunk=1, workers=2, seed=0) is None
        assert simulate(LagRule(u, u - 1), 96, chunk=1, workers=2, seed=0) is not None


def test_chunks_are_cut_at_every_new_version():
    assert cut_chunks(range(8, 24), 6, 4) == [range(8, 12), range(12, 14), range(14, 18), range(18, 20), range(20, 24)]
    assert cut_chunks(range(10), 100, 4) == [range(4), range(4, 8), range(8, 10)]


def test_nearest_divisor():
    assert [nearest_divisor(96, wanted) for wanted in (5, 7, 10, 500)] == [4, 6, 8, 96]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["needs sync_every"]),
        ({"sync_every": 4}, ["needs max_lag"]),
        ({"sync_every": 5, "max_lag": 8}, ["does not divide", "nearest divisor is 4"]),
        ({"sync_every": 8, "max_lag": 6}, ["could never be generated", "at least 7", "at most 7"]),
        ({"sync_every": 4, "delay": 2, "max_lag": 10}, ["8 to 11", "at least 11"]),
        ({"sync_every": 4, "lockstep": True, "max_lag": 2}, ["lockstep", "0 to 3", "at least 3"]),
        ({"sync_every": 4, "lockstep": True, "partial": True}, ["need a single version per batch"]),
        (
            {"sync_every": 4, "max_lag": 8, "partial": True, "colocate": True},
            ["colocate", "never updates weights during generation"],
        ),
        ({"kind": "staged", "sync_every": 4}, ["sync_every", 'kind = "live"']),
        ({"kind": "staged", "max_lag": 0}, ["max_lag", 'kind = "live"']),
        ({"kind": "staged", "delay": 1}, ["delay", 'kind = "live"']),
        ({"kind": "staged", "colocate": True}, ["colocate", 'kind = "live"']),
        ({"kind": "staged", "passes": 5}, ["updates of all passes", "nearest divisor is 4"]),
        ({"sync_every": 4, "lockstep": True, "passes": 2}, ['kind = "staged"', "once"]),
    ],
)
def test_contradictions_are_refused_with_the_nearest_way_out(settings, words):
    with pytest.raises(ValueError, match="(?s)" + ".*".join(words)):
        ScheduleTable(**{"kind": "live", "updates_per_stage": 96} | settings)


def test_what_follows_from_lockstep_and_delay():
    def rule(**settings):
        return ScheduleTable(kind="live", updates_per_stage=96, sync_every=4, **settings).lag_rule

    assert rule(lockstep=True) == LagRule(4, 3, 0)
    assert rule(delay=2) == LagRule(4, 11, 2)
    assert rule(delay=2, max_lag=20) == LagRule(4, 20, 2)
    assert rule(max_lag=3) == LagRule(4, 3, None)


def test_a_wrong_recipe_says_so_like_any_other(tmp_path):
    from megarl.recipe.load import load_recipe

    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\npath="."\n[data]\nsource="file"\ntrain="x.jsonl"\n[reward]\nkind="exact"\n[schedule]\nkind="live"\n'
        "sync_every = 8\nmax_lag = 3\n"
    )
    with pytest.raises(UserError, match="schedule: max_lag = 3.*at least 7"):
        load_recipe(path)
