"""Decoupled PPO's proximal policy is the policy before a step of several updates."""

import pytest

from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.planner.preflight import check_recipe
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from tests.actor.ranks import run_ranks
from tests.helpers import read_lines
from tests.phases import plain_loop
from tests.phases.commands import settings, train
from tests.phases.test_kill import kill_at

OPTIONS = settings(
    "objective.name=decoupled_ppo", "objective.proximal_updates=3", "objective.eps_low=0.001",
    "objective.eps_high=0.001", "actor.checkpoint_every=3", "schedule.stages=1", "eval.every=0", "metrics.detail=2",
)  # fmt: skip
WEIGHTS = "final/model.safetensors"


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """A run of two steps of three updates each."""
    run = tmp_path_factory.mktemp("proximal") / "run"
    train(recipe, run, *OPTIONS)
    return run


def test_the_proximal_policy_is_the_one_before_the_step(run, tmp_path):
    run_ranks(plain_loop.train, (run, tmp_path / "loop", tmp_path), 1)
    assert (tmp_path / "loop/model.safetensors").read_bytes() == (run / WEIGHTS).read_bytes()
    clipped = [line["clip_fraction"] for line in read_lines(run / "metrics.jsonl")]
    assert clipped[0] == clipped[3] == 0 < min(max(clipped[1:3]), max(clipped[4:]))


@pytest.mark.crash
def test_a_run_killed_within_a_step_ends_with_the_same_bytes(recipe, run, tmp_path):
    again = tmp_path / "run"
    kill_at("open .*metrics.jsonl", 5, recipe, again, *OPTIONS)
    train(recipe, again, *OPTIONS)
    assert (again / WEIGHTS).read_bytes() == (run / WEIGHTS).read_bytes()
    assert [line["update"] for line in read_lines(again / "metrics.jsonl")] == list(range(1, 7))


def test_every_nth_line_of_metrics_has_details(run):
    lines = read_lines(run / "metrics.jsonl")
    assert [line["update"] for line in lines if "muted_tokens" in line] == [2, 4, 6]
    line = min(lines[1::2], key=lambda line: line["kept_fraction"])
    tokens = line["muted_tokens"]
    muted = round(line["trained_tokens"] * (1 - line["kept_fraction"]))
    assert sum(tokens["muted"]) == muted > 0  # all tokens are listed, since the vocabulary has fewer than 50
    tokenizer = load_tokenizer(RunDir.open(run).recipe.model.tokenizer_path)
    assert tokens["text"] == [tokenizer.decode([token]) for token in tokens["id"]] and "a" in tokens["text"]
    assert sum(map(sum, line["entropy_by_ratio"]["counts"])) == line["trained_tokens"]
    for line in lines:  # without variance in its groups a batch has no positive or negative advantages
        for name in ("response_tokens/positive", "response_tokens/negative", "positive_share/loss"):
            assert (name in line) == (line["zero_variance_fraction"] < 1), (line["update"], name)
    assert any("positive_share/loss" in line for line in lines)


def test_settings_that_would_cut_a_step_are_refused(recipe):
    steps = ["objective.name=decoupled_ppo", "objective.proximal_updates=3"]
    check_recipe(load_recipe(recipe, [*steps, "actor.checkpoint_every=6"]))
    with pytest.raises(UserError, match="actor.checkpoint_every = 2 would cut a step.*for example 3"):
        check_recipe(load_recipe(recipe, steps))
    with pytest.raises(UserError, match="schedule.updates_per_stage = 7 would cut a step.*for example 6"):
        check_recipe(load_recipe(recipe, [*steps, "actor.checkpoint_every=3", "schedule.updates_per_stage=7"]))
    live = ["schedule.kind=live", "schedule.lockstep=true", "actor.checkpoint_every=3"]
    check_recipe(load_recipe(recipe, [*steps, *live, "schedule.sync_every=3"]))
    with pytest.raises(UserError, match="schedule.sync_every = 2 would cut a step"):
        check_recipe(load_recipe(recipe, [*steps, *live, "schedule.sync_every=2"]))
    with pytest.raises(UserError, match="sync_every = 2: 2 updates form a step.*actor.checkpoint_every = 3 would cut"):
        check_recipe(load_recipe(recipe, [*live, "schedule.sync_every=2", "objective.truncated_importance={}"]))
    with pytest.raises(UserError, match="proximal_updates is 0.*at least 1"):
        load_recipe(recipe, [steps[0], "objective.proximal_updates=0"])
