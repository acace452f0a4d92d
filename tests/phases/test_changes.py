"""Settings that change from a stage on, rollouts that are scored again, and runs that continue from another run."""

import shutil

import pytest

from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from tests.helpers import events, metrics
from tests.phases.commands import settings, succeed, train

SMALL = ("schedule.updates_per_stage=2", "actor.checkpoint_every=2", "eval.every=0")
OVERLONG = 'reward.parts=[{kind="overlong", weight=2.0, buffer=5}]'


@pytest.fixture(scope="module")
def changed(recipe, tmp_path_factory):
    """A run whose second stage has another learning rate and reward.

    The learning rate of the first stage is corrected between its rollouts and its updates.
    """
    root = tmp_path_factory.mktemp("changed") / "run"
    train(recipe, root, *settings(*SMALL, "optimizer.lr=0.5"), "--until", "rollout:0")
    refused = train(recipe, root, *settings(*SMALL, "optimizer.lr=0.5", "reward.require_stop=false"), code=2)
    assert "reward.require_stop: True -> False" in refused.stderr  # refused, since the stage has rollouts
    train(recipe, root, *settings(*SMALL, "optimizer.lr=2e-4"), "--until", "optimize:0")
    # unlike a learning rate, where statistics come from cannot change from a stage on
    refused = train(recipe, root, *settings(*SMALL, "optimizer.lr=2e-4", "actor.statistics_scope=micro"), code=2)
    assert "actor.statistics_scope" in refused.stderr
    train(recipe, root, *settings(*SMALL, "optimizer.lr=1e-3", "reward.require_stop=false", OVERLONG))
    return RunDir.open(root)


def rewards_of(stage):
    store = RolloutStore(stage.rollouts)
    return [response.reward for group in store.read(store.group_ids) for response in group.responses]


def test_settings_change_from_a_stage_on(changed):
    assert [line["lr"] for line in metrics(changed)] == [2e-4, 2e-4, 1e-3, 1e-3]
    before, event = events(changed, "recipe_changed")
    assert "stage" not in before and event["stage"] == 1 and "reward.require_stop: True -> False" in event["settings"]
    first, second = (changed.stage(number).run.recipe for number in (0, 1))
    assert (first.reward.require_stop, second.reward.require_stop) == (True, False)
    assert (first.optimizer.lr, second.optimizer.lr) == (2e-4, 1e-3)
    assert changed.stage(0).next.run.recipe == changed.recipe
    penalised = [any(reward < 0 for reward in rewards_of(stage)) for stage in changed.stages()]
    assert penalised == [False, True]
    found = audit(changed.root, 1000)  # it scores every response again, with the reward of its stage
    assert (found.problems, found.notes) == ([], [])


def test_a_branch_with_another_reward_scores_the_rollouts_again(changed, tmp_path):
    succeed("optimize", changed.root, "--stage", 0, "--output", tmp_path / "b", *settings(OVERLONG))
    run = RunDir.open(tmp_path / "b")
    before, after = (RolloutStore(one.stage(0).rollouts) for one in (changed, run))
    differ = 0
    for old, new in zip(before.read(before.group_ids), after.read(after.group_ids), strict=True):
        for was, now in zip(old.responses, new.responses, strict=True):
            assert was.tokens.tobytes() + was.rollout_logprobs.tobytes() == (
                now.tokens.tobytes() + now.rollout_logprobs.tobytes()
            )
            penalty = -min(1.0, max(0, len(was.tokens) - 1) / 5)  # the buffer is the last 5 of at most 6 tokens
            assert now.reward == pytest.approx(was.reward + 2.0 * penalty)
            differ += now.reward != was.reward
    assert differ
    assert metrics(run)[0]["reward/mean"] != metrics(changed)[0]["reward/mean"]
    found = audit(run.root, 1000)
    assert (found.problems, found.notes) == ([], [])
    # a branch has one stage, so there is no next one from which a setting could change
    other = settings(OVERLONG, "optimizer.lr=5e-3")
    refused = succeed("optimize", changed.root, "--stage", 0, "--output", tmp_path / "b", *other, code=2)
    assert "optimizer.lr: 0.0002 -> 0.005" in refused.stderr


def test_a_run_continues_from_another_with_or_without_its_optimizer_state(changed, recipe, tmp_path):
    model = f"model.path='{changed.final}'"
    train(recipe, tmp_path / "a", "--continue-from", changed.root, *settings(*SMALL), "--until", "rollout:0")
    train(tmp_path / "a/recipe.toml", tmp_path / "a", "--until", "optimize:0")  # its recipe names the policy
    train(recipe, tmp_path / "b", *settings(*SMALL, model), "--until", "optimize:0")
    one, other = RunDir.open(tmp_path / "a"), RunDir.open(tmp_path / "b")
    assert one.recipe.model == other.recipe.model
    (a, *_), (b, *_) = metrics(one), metrics(other)
    assert a["reward/mean"] == b["reward/mean"] and a["loss"] == pytest.approx(b["loss"], abs=1e-6)
    ends = [(run.stage(1).policy / "model.safetensors").read_bytes() for run in (one, other)]
    assert ends[0] != ends[1]  # because of Adam's moments
    succeed("optimize", one.root, "--stage", 0, "--output", tmp_path / "c")
    assert (tmp_path / "c/stages/001/policy/model.safetensors").read_bytes() == ends[0]


def test_continuing_from_an_unfinished_run_is_refused(recipe, changed, tmp_path):
    shutil.copytree(changed.root, tmp_path / "part", symlinks=True)
    shutil.rmtree(tmp_path / "part/final")
    refused = train(recipe, tmp_path / "a", "--continue-from", tmp_path / "part", code=2)
    assert "--continue-from" in refused.stderr and "not finished" in refused.stderr
