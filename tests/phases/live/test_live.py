"""Live stages end to end: the staleness of trained tokens, and equality with a staged run if that is on-policy too."""

import shutil

import pytest

from megarl.storage.rollouts import RolloutStore
from tests.helpers import events, metrics
from tests.phases.live.conftest import go_on, histogram
from tests.storage.sample_rollouts import as_bytes

TIMES = {"seconds", "tokens_per_second", "idle_seconds"}


def groups(run, stage=0):
    store = RolloutStore(run.stage(stage).rollouts, one_policy=False)
    return store.read(list(run.stage(stage).groups))


def weights(policy):
    return (policy / "model.safetensors").read_bytes()


LIVE = {"apart": {"lockstep": True}, "together": {"lockstep": True, "colocate": True, "rollout__workers": 2}}


def test_lockstep_equals_the_staged_run_with_as_many_updates(new_run):
    """Also where roles take turns on the same devices, though one of two engines may have no further chunks."""
    # a staged run computes the log-probs that TIS needs with a second model, a live one before the first of two updates
    settings = {"objective__truncated_importance__maximum": 1.0}
    staged = new_run("staged", stages=2, updates_per_stage=2, **settings)
    go_on(staged)
    one = [as_bytes(group) for stage in range(2) for group in groups(staged, stage)]

    def comparable(run):
        dropped = TIMES | {"stage", "staleness/min", "staleness/mean", "staleness/max", "staleness/tokens"}
        return [{k: v for k, v in update.items() if k not in dropped} for update in metrics(run)]

    for name, how in LIVE.items():
        live = new_run(name, kind="live", stages=1, updates_per_stage=4, sync_every=2, **how, **settings)
        go_on(live)
        assert weights(live.final) == weights(staged.final)
        assert [as_bytes(group) for group in groups(live)] == one
        assert comparable(live) == comparable(staged)
        assert live.versions() == []  # all are removed once the stage has ended


def test_delay_gives_exactly_the_lags_of_a_buffer(new_run):
    """With two engines and two trainers."""
    run = new_run(
        "run", kind="live", stages=2, updates_per_stage=8, sync_every=2, delay=2, prompts_per_update=2,
        actor__processes_per_node=2, rollout__workers=2, rollout__groups_per_chunk=2, actor__checkpoint_every=40,
    )  # fmt: skip
    go_on(run, "--until", "optimize:0")
    assert run.versions() == [4, 6]  # the next stage's first batches need these
    go_on(run)
    assert run.versions() == []
    updates = metrics(run)
    assert [update["staleness"] for update in updates] == [*range(4), *[4, 5] * 6]
    assert all(update["staleness/min"] == update["staleness/max"] for update in updates)
    for stage in run.stages():
        assert [group.group_id for group in groups(run, stage.number)] == list(stage.groups)
    assert [event["version"] for event in events(run, "export")] == list(range(2, 17, 2))
    # the idle times of the second stage are the sums of their parts
    idle = {event["role"]: event for event in events(run, "idle") if event["stage"] == 1}
    waits = [update["idle_seconds"] for update in metrics(run) if update["stage"] == 1]
    assert idle["trainer"]["idle_seconds"] == pytest.approx(sum(waits), abs=1e-4 * len(waits))
    parts = sum(idle["rollout"][name] for name in ("idle_seconds", "load_seconds", "generate_seconds"))
    assert idle["rollout"]["generate_seconds"] > 0 and parts <= idle["rollout"]["seconds"]
    loads = [event["load_seconds"] for event in events(run, "weight_drift") if event["stage"] == 1]
    assert min(loads) > 0 and sum(loads) <= idle["rollout"]["load_seconds"] + 1e-3 * len(loads)
    for event in idle.values():
        assert event["ratio"] == pytest.approx(event["idle_seconds"] / event["seconds"], abs=1e-3)
    # what was trained cannot be generated again, because the policies that may are gone
    shutil.rmtree(run.stage(1).rollouts)
    assert "either updates have trained these groups" in go_on(run, code=2).stderr


def test_taking_turns_engines_generate_all_that_they_may_and_trainers_train_all_of_it(new_run):
    run = new_run(
        "run", kind="live", stages=1, updates_per_stage=16, sync_every=2, max_lag=7, colocate=True,
        actor__checkpoint_every=24, prompts_per_update=2, rollout__groups_per_chunk=2,
    )  # fmt: skip
    go_on(run)
    assert [update["staleness"] for update in metrics(run)] == [batch % 8 for batch in range(16)]
    assert max(histogram(metrics(run))) == 7
    for number, group in enumerate(groups(run)):
        assert {response.policy_version for response in group.responses} == {number // 2 - number // 2 % 8}
