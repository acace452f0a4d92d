"""``megarl samples --tokens``: its values of single tokens, averaged, equal the trainer's metrics."""

import json

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.storage.run_dir import RunDir
from megarl.views.responses.select import Filter, decoder, select
from megarl.views.responses.tokens import annotate, find_policy, with_objective
from tests.helpers import metrics
from tests.phases.commands import settings, succeed, train
from tests.views.test_samples import shown

SETTINGS = (
    "schedule.updates_per_stage=4",
    "eval.every_updates=1",  # each policy of the stage is exported
    "objective.name=m2po",  # its mask is decided by the whole batch
    "objective.m2_threshold=1e-2",
    "optimizer.lr=2e-3",
    "rollout.temperature=0.9",
)


@pytest.fixture(scope="module")
def trained(recipe):
    train(recipe, recipe.parent / "run", "--until", "optimize:0", *settings(*SETTINGS))
    return RunDir.open(recipe.parent / "run")


def of_update(run, update):
    """The responses that update number ``update``, from 1, trains on."""
    ids = run.stage(0).groups_of_update(run.stage(0).groups, update - 1)
    return [one for one in select(run.root, Filter(), decoder(run.root)) if one.prompt in ids]


def test_values_of_tokens_average_to_the_metrics_of_their_update(trained):
    for update in (2, 3, 4):
        line = metrics(trained)[update - 1]
        tokens = annotate(trained, of_update(trained, update), trained.recipe, str(update - 1))
        ratios, entropy = (np.concatenate([getattr(one, name) for one in tokens]) for name in ("ratios", "entropy"))
        masked = [cause == "m2_mask" for one in tokens for cause in one.causes]
        assert ratios.mean() == pytest.approx(line["ratio/mean"], rel=1e-5)
        assert np.square(ratios).mean() == pytest.approx(line["ratio/square_mean"], rel=1e-5)
        assert entropy.mean() == pytest.approx(line["entropy"], rel=1e-5)
        assert np.mean(masked) == pytest.approx(line["m2_mask_fraction"])
        assert np.mean([kept for one in tokens for kept in one.kept]) == pytest.approx(line["kept_fraction"])
        assert 0 < sum(masked) < len(masked)


def test_values_of_another_objective_at_the_default_policy(trained):
    """That is the one after the stage."""
    found, changes = of_update(trained, 1), ("name=grpo", "eps_low=0.02", "eps_high=0.03")
    recipe = with_objective(trained.recipe, [f"objective.{change}" for change in changes])
    tokens, after_it = (annotate(trained, found, recipe, policy) for policy in (None, "4"))
    clipped = 0
    for one, seen, same in zip(found, tokens, after_it, strict=True):
        np.testing.assert_array_equal(seen.logprobs, same.logprobs)
        ratio = np.exp(seen.logprobs - one.response.rollout_logprobs)
        lost = (ratio > 1.03) & (seen.advantage > 0) | (ratio < 0.98) & (seen.advantage < 0)
        assert (~seen.kept).tolist() == lost.tolist() == [cause == "clip" for cause in seen.causes]
        clipped += int(lost.sum())
    assert clipped


def test_json_of_the_command_and_refused_settings(trained):
    result = succeed("samples", trained.root, "--limit", "3", "--tokens", "kept", "--policy", "2", "--json")
    for record in map(json.loads, result.stdout.splitlines()):
        assert "".join(token["text"] for token in record["tokens"]) == record["text"]
        assert {token["ratio"] != 1 for token in record["tokens"]} == {True}
    with pytest.raises(UserError, match="exported ones: after update 0, 1, 2, 3, 4; final, best"):
        find_policy(trained, "9", trained.stage(0))
    with pytest.raises(UserError, match=r"may change only \[objective\]"):
        with_objective(trained.recipe, ["rollout.temperature=1"])


def test_tokens_without_gradient_are_red_on_a_terminal(trained):
    """As many as in the whole batch, though each prompt is shown alone. The name of the mask stands beside them."""
    found, asked = of_update(trained, 3), dict(terminal=True, colouring="kept", policy="2", limit=99)
    lost = sum(int((~one.kept).sum()) for one in annotate(trained, found, trained.recipe, "2"))
    prompts = sorted({one.prompt for one in found})
    output = "".join(shown(trained.root, wanted=Filter(prompt=number), **asked) for number in prompts)
    assert output.count("\x1b[30;48;5;203m") == lost > 0
    assert "[m2_mask]" in output
