"""Live stages end to end: the staleness of trained tokens, and equality with a staged run if that is on-policy too."""

import os
import shutil

import pytest

from megarl.recipe.load import override_recipe
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.phases.live.conftest import events, histogram, metrics
from tests.storage.sample_rollouts import as_bytes

TIMES = {"seconds", "tokens_per_second", "idle_seconds"}


def groups(run, stage=0):
    store = RolloutStore(run.stage(stage).rollouts, one_policy=False)
    return store.read(list(run.stage(stage).groups))


def weights(policy):
    return (policy / "model.safetensors").read_bytes()


# a staged run computes the log-probs that TIS needs with a second model, a live one before the first of two updates
COMPOSED = [{"objective__truncated_importance__maximum": 1.0}]
if os.environ.get("MEGARL_EVERY_LAYOUT"):  # all that docs/compositions.md has for lockstep
    COMPOSED += [
        {"objective__icepop__maximum": 1.0},
        {"objective__opsm__delta": 1e-4},
        {"objective__kl__coefficient": 0.1},
        {"objective__name": "decoupled_ppo", "objective__proximal_updates": 2},
        {"passes": 2},
    ]


@pytest.mark.parametrize("settings", COMPOSED)
def test_lockstep_equals_the_staged_run_with_as_many_updates(phases, new_run, settings):
    staged = new_run("staged", stages=2, updates_per_stage=2, **settings)
    for stage in range(2):
        phases(staged, "rollout", stage)
        phases(staged, "optimize", stage)
    live = new_run("live", kind="live", stages=1, updates_per_stage=4, sync_every=2, lockstep=True, **settings)
    phases(live, "live")
    assert weights(live.final) == weights(staged.final)
    one = [as_bytes(group) for stage in range(2) for group in groups(staged, stage)]
    assert [as_bytes(group) for group in groups(live)] == one

    def comparable(run):
        dropped = TIMES | {"stage", "staleness/min", "staleness/mean", "staleness/max", "staleness/tokens"}
        return [{k: v for k, v in update.items() if k not in dropped} for update in metrics(run)]

    assert comparable(live) == comparable(staged)
    assert live.versions() == []  # all are removed once the stage has ended


@pytest.mark.parametrize("sync_every", [1, 4])
def test_delay_gives_exactly_the_lags_of_a_buffer(phases, new_run, sync_every):
    u = sync_every
    run = new_run(
        "run", kind="live", stages=2, updates_per_stage=4 * u, sync_every=u, delay=2, prompts_per_update=2,
        actor__checkpoint_every=40,
    )  # fmt: skip
    phases(run, "live", 0)
    assert run.versions() == [v for v in (2 * u, 3 * u) if v % (4 * u)]  # the next stage's first batches need these
    phases(run, "live", 1)
    assert run.versions() == []
    updates = metrics(run)
    assert [update["staleness"] for update in updates[: 2 * u]] == list(range(2 * u))
    assert sorted(histogram(updates[2 * u :])) == list(range(2 * u, 3 * u))
    lags = [update["staleness"] for update in updates[2 * u :]]
    assert lags == [2 * u + i % u for i in range(6 * u)]
    assert all(update["staleness/min"] == update["staleness/max"] for update in updates)


@pytest.mark.parametrize("max_lag", [4, 16])
def test_staleness_stays_within_max_lag_and_idle_times_add_up(phases, new_run, max_lag):
    run = new_run(
        "run", kind="live", stages=1, updates_per_stage=40, sync_every=4, max_lag=max_lag, prompts_per_update=2,
        rollout__groups_per_chunk=4, actor__checkpoint_every=40,
    )  # fmt: skip
    phases(run, "live")
    lags = histogram(metrics(run))
    assert max(lags) <= max_lag
    assert min(lags) >= 0
    for number, group in enumerate(groups(run)):
        assert all(0 <= number // 2 - response.policy_version <= max_lag for response in group.responses)
    published = [event["version"] for event in events(run, "export")]
    assert published == [*range(4, 40, 4), 40]
    idle = {event["role"]: event for event in events(run, "idle")}
    waited = sum(update["idle_seconds"] for update in metrics(run))
    assert idle["trainer"]["idle_seconds"] == pytest.approx(waited, abs=1e-4 * len(metrics(run)))
    parts = sum(idle["rollout"][name] for name in ("idle_seconds", "load_seconds", "generate_seconds"))
    assert idle["rollout"]["generate_seconds"] > 0 and parts <= idle["rollout"]["seconds"]
    loads = [event["load_seconds"] for event in events(run, "weight_drift")]
    assert min(loads) > 0 and sum(loads) <= idle["rollout"]["load_seconds"] + 1e-3 * len(loads)
    for event in idle.values():
        assert event["ratio"] == pytest.approx(event["idle_seconds"] / event["seconds"], abs=1e-3)


def test_the_trainer_refuses_rollouts_older_than_max_lag(phases, new_run):
    """The rollouts are made with a large ``max_lag``; a run with a small one must not train on them silently."""
    run = new_run("run", kind="live", stages=1, updates_per_stage=12, sync_every=2, max_lag=11, prompts_per_update=2)
    phases(run, "live")
    assert max(histogram(metrics(run))) > 1
    strict = RunDir.create(run.root.with_name("strict"), override_recipe(run.recipe, ["schedule.max_lag=1"]))
    shutil.copytree(run.root / "stages", strict.root / "stages", ignore=shutil.ignore_patterns("checkpoints"))
    phases.start(strict, "live")
    assert phases.wait()[0] == 2
    assert "max_lag = 1" in (phases.logs / "rank_0000.log").read_text()
    trained = metrics(strict) if strict.metrics.exists() else []
    assert all(update["staleness"] <= 1 for update in trained)


def test_colocated_roles_take_turns(phases, new_run):
    settings = {"kind": "live", "stages": 1, "updates_per_stage": 6, "sync_every": 2, "lockstep": True}
    apart, together = new_run("apart", **settings), new_run("together", colocate=True, **settings)
    phases(apart, "live")
    phases(together, "live")
    assert weights(together.final) == weights(apart.final)
    assert [as_bytes(g) for g in groups(together)] == [as_bytes(g) for g in groups(apart)]
    # an engine without further chunks must not block the trainers, for which another engine may be waiting
    two = new_run("two", colocate=True, rollout__workers=2, **settings)
    phases(two, "live")
    assert weights(two.final) == weights(apart.final)
    # engines generate all that they may before trainers begin, and trainers train on all of it before engines wake
    free = new_run(
        "free", kind="live", stages=1, updates_per_stage=24, sync_every=2, max_lag=7, colocate=True,
        actor__checkpoint_every=24, prompts_per_update=2, rollout__groups_per_chunk=2,
    )  # fmt: skip
    phases(free, "live")
    assert [update["staleness"] for update in metrics(free)] == [batch % 8 for batch in range(24)]


def test_two_engines_and_two_trainers(phases, new_run):
    run = new_run(
        "run", kind="live", stages=1, updates_per_stage=8, sync_every=2, delay=1, actor__processes_per_node=2,
        rollout__workers=2, rollout__groups_per_chunk=2,
    )  # fmt: skip
    phases(run, "live")
    assert [g.group_id for g in groups(run)] == list(run.stage(0).groups)
    assert [update["staleness"] for update in metrics(run)] == [0, 1, 2, 3, 2, 3, 2, 3]
