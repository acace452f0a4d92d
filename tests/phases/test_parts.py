"""Small functions of the phases, compared with results computed by hand."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.commands.one_phase import branch_recipe
from megarl.errors import UserError
from megarl.phases.generation import RolloutStats
from megarl.phases.rollout_worker import _extended
from megarl.phases.samples import to_samples
from megarl.phases.updates import remove_checkpoints
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.tables import ObjectiveTable
from megarl.rollout.engine import Completion, expert_type
from megarl.storage.metrics.summary import summary
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import RunDir


def group(number, rewards):
    def response(reward, length):
        finish = "stop" if reward else "length"
        return Response(np.arange(length, dtype=np.int32), np.full(length, -1, np.float32), reward, finish, 0)

    return Group(number, np.array([5], np.int32), tuple(response(r, i + 1) for i, r in enumerate(rewards)))


def test_advantages_are_relative_to_the_group_and_groups_without_variance_are_dropped_on_request():
    groups = [group(0, [1.0, 0.0]), group(1, [1.0, 1.0])]
    samples = to_samples(groups, ObjectiveTable(advantage="group_mean"))
    assert [s.advantage for s in samples] == [0.5, -0.5, 0.0, 0.0]
    assert [len(s.response_tokens) for s in samples] == [1, 2, 1, 2]
    assert all(s.trained for s in samples)
    drop = ObjectiveTable(advantage="group_mean", zero_variance="drop")
    assert [s.advantage for s in to_samples(groups, drop)] == [0.5, -0.5]
    (filler,) = to_samples(groups[1:], drop)
    assert not filler.trained


def test_experts_are_replayed_where_the_engine_recorded_them():
    recorded = [np.full((length, 2, 1), length, np.int8) for length in (1, 2)]
    before = group(0, [1.0, 0.0])
    responses = (replace(r, routed_experts=e) for r, e in zip(before.responses, recorded, strict=True))
    groups = [replace(before, responses=tuple(responses))]
    for asked, expected in ((True, recorded), (False, [None, None])):
        samples = to_samples(groups, ObjectiveTable(), asked)
        assert all(s.routed_experts is e for s, e in zip(samples, expected, strict=True))
    with pytest.raises(UserError, match='routing_replay = "engine": group 1 has no routed experts'):
        to_samples([*groups, group(1, [1.0, 0.0])], ObjectiveTable(), True)


def test_each_span_of_a_continued_response_keeps_its_experts():
    """The prompt, of three tokens, has the experts of the first span."""

    def part(tokens, version, rows):
        experts = None if version is None else np.full((rows, 2, 1), version, np.int8)
        empty = np.zeros(tokens, np.float32)
        return Completion(0, 0, empty.astype(np.int32), empty, "interrupted", experts, version or 0)

    joined = functools.reduce(_extended, [part(2, 4, 4), part(1, -1, 5), part(3, 5, 8)], None)
    assert joined.routed_experts[:, 0, 0].tolist() == [4, 4, 4, 4, -1, 5, 5, 5]
    assert joined.versions.tolist() == [4, 4, -1, 5, 5, 5]
    assert functools.reduce(_extended, [part(2, None, 4), part(1, None, 5)], None).routed_experts is None


@pytest.mark.parametrize(("experts", "name"), [(128, "int8"), (129, "int16")])
def test_expert_ids_have_the_smallest_integer_type_that_also_holds_minus_one(experts, name):
    assert expert_type(experts) == name
    assert np.array([-1, experts - 1], expert_type(experts)).tolist() == [-1, experts - 1]


def test_metrics_of_an_update():
    values = summary([group(0, [1.0, 0.0]), group(1, [1.0, 1.0])])
    assert values["reward/mean"] == 0.75
    assert values["zero_variance_fraction"] == 0.5
    assert values["response_tokens/mean"] == 1.5
    assert values["truncated_fraction"] == 0.25


def test_statistics_of_a_rollout():
    told = {}
    stage = SimpleNamespace(log_event=lambda kind, **event: told.update(event))
    engine = SimpleNamespace(decoding=6, decoding_tokens=7)
    worker = SimpleNamespace(engine=engine, scoring=SimpleNamespace(over_limit=1), discarded=0)
    stats = RolloutStats(stage, 0, worker)
    scored = [group(n, rewards) for n, rewards in enumerate([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])]
    ended = {"stop": np.zeros(3, np.float32), "length": np.zeros(5, np.float32), "interrupted": np.zeros(4, np.float32)}
    stats.step([Completion(0, 0, x.astype(np.int32), x, why, None, 0) for why, x in ended.items()], scored)
    stats.log()
    expected = {"groups": 4, "responses": 8, "decoding": 6, "decoding_tokens": 7, "ended": 2, "tokens": 12}
    expected |= {"over_limit": 1, "longest": 2, "truncated": 3, "reward_sum": 5.0}
    assert told.items() >= expected.items()


def test_a_run_resumes_with_other_memory_replicas_and_engines(recipe, tmp_path):
    recipe = load_recipe(recipe, ["stages.1.engine=vllm"])
    assert {stage: table.engine for stage, table in recipe.distinct_rollouts.items()} == {0: "builtin", 1: "vllm"}
    assert recipe.rollout_of(0) == recipe.rollout
    RunDir.create(tmp_path, recipe)
    changes = ["rollout.memory_fraction=0.5", "stages.1.workers=2", "rollout.groups_per_chunk=16"]
    smaller = override_recipe(recipe, changes)
    assert RunDir.create(tmp_path, smaller).recipe.rollout_of(1).workers == 2
    assert RunDir.open(tmp_path).recipe.rollout_of(1).memory_fraction == 0.5
    other = RunDir.create(tmp_path, override_recipe(smaller, ["stages.1.engine=builtin"]))
    assert other.recipe.rollout_of(1).engine == "builtin"


def test_a_branch_refuses_settings_that_do_not_fit_its_rollouts(recipe, tmp_path):
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    for override, message in {
        "actor.routing_replay=engine": "have no recorded experts",
        "rollout.temperature=0.9": "the rollouts are reused: rollout.temperature",
        "schedule.stages=3": "the rollouts are reused: schedule.stages",
        "schedule.updates_per_stage=7": "the stage has 24 groups, but 7 updates of 4 groups need 28",
        "schedule.prompts_per_update=0": "schedule.prompts_per_update",
        "schedule.prompts_per_update=many": "schedule.prompts_per_update",
        "objective.name=grpo": "cannot be optimized yet",
        "schedule.passes=4": "cannot be optimized yet",
    }.items():
        with pytest.raises(UserError, match=message):
            branch_recipe(run.stage(0), [override])
    with pytest.raises(
        UserError, match="can change the batches of the first stage only: schedule.prompts_per_update: 4 -> 8"
    ):
        branch_recipe(run.stage(1), ["schedule.prompts_per_update=8"])


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        (["schedule.prompts_per_update=2"], 12),
        (["schedule.prompts_per_update=5"], 4),  # 4 of the 24 groups are left over
        (["schedule.passes=3"], 18),
        (["schedule.prompts_per_update=8", "schedule.passes=2"], 6),
        (["schedule.prompts_per_update=8", "schedule.updates_per_stage=2"], 2),
        ([], 6),
    ],
)
def test_a_branch_in_other_batches_makes_as_many_updates_as_its_groups_fill(recipe, tmp_path, changes, updates):
    stage = RunDir.create(tmp_path / "run", load_recipe(recipe)).stage(0)
    for path in (stage.policy, stage.rollouts):
        path.mkdir(parents=True)
    assert branch_recipe(stage, changes).schedule.updates_per_stage == updates


@pytest.mark.parametrize(("keep", "stay"), [(1, [0, 3]), (2, [0, 2, 3]), (9, [0, 1, 2, 3]), (None, [0, 1, 2, 3])])
def test_checkpoints_of_the_last_finished_stages_are_kept(recipe, tmp_path, keep, stay):
    """Those of the run: the first stage has a link to those of another."""
    settings = [f"actor.keep_stages={keep}"] if keep else []
    run = RunDir.create(tmp_path / "run", load_recipe(recipe, ["schedule.stages=4", *settings]))
    origin = tmp_path / "origin"
    for checkpoints in (origin, *(run.stage(stage).checkpoints for stage in (1, 2, 3))):
        (checkpoints / "update_000006").mkdir(parents=True)
    run.stage(0).directory.mkdir(parents=True, exist_ok=True)
    run.stage(0).checkpoints.symlink_to(origin)
    remove_checkpoints(run, 4)
    assert [stage for stage in range(4) if run.stage(stage).checkpoints.exists()] == stay
    assert (origin / "update_000006").exists()
