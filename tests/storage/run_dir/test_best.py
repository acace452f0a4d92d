"""``best/`` after a change of ``eval.best``, where it is the only copy of its policy.

tests/phases/test_evaluation.py kills runs while it is written.
"""

import shutil

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.policies import PolicyInfo, read_info, write_info
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.retention import best_version, keep_best, update_best_and_remove_policies

SUITES = 'every = 1\n[[eval.suites]]\nname = "heldout"\n[[eval.suites]]\nname = "other"\ngreedy = true\n'
SCORES = {0: (0.8, 0.0), 1: (0.2, 0.5), 2: (0.3, 0.6), 3: (0.95,)}  # of each stage's policy; the last lacks a suite


@pytest.fixture
def settings(recipe, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.read_text().replace("[run]", SUITES + "[run]"))
    return lambda *changes: load_recipe(path, ["schedule.stages=4", "actor.keep_policies=1", *changes])


def finish(run, number, scores=None):
    """Write a stage's policy and its seal, and with ``scores`` its evaluations on the two suites."""
    stage = run.stage(number)
    (stage.policy / "additional_chat_templates").mkdir(parents=True)
    (stage.policy / "additional_chat_templates/tool_use.jinja").write_text("a template")
    (stage.policy / "model.safetensors").write_bytes(b"%d" % stage.number)
    write_info(stage.policy, PolicyInfo(stage.first_update, f"hash of {stage.number}"))
    stage.rollouts.mkdir()
    (stage.rollouts / "SEALED").touch()
    if scores:
        evaluate(run, number, scores)


def evaluate(run, number, scores):
    for suite, accuracy in zip(("heldout", "other"), scores, strict=False):
        update = run.stage(number).first_update
        run.log_event("evaluation", stage=number, update=update, suite=suite, accuracy=accuracy)


def held(run):
    """The number of the stage whose policy ``best`` holds."""
    assert (run.best / "additional_chat_templates/tool_use.jinja").read_text() == "a template"
    assert read_info(run.best).weights_hash == f"hash of {int((run.best / 'model.safetensors').read_text())}"
    return int((run.best / "model.safetensors").read_text())


def test_a_change_of_eval_best_keeps_the_only_copy_of_the_best_policy(settings, tmp_path):
    """By the first suite stage 0's policy is best; by the mean stage 2's, which then exists only in ``best``."""
    run = RunDir.create(tmp_path / "run", settings("eval.best=first"))
    for number in range(2):
        finish(run, number, SCORES[number])
        update_best_and_remove_policies(run.stage(number))
    assert held(run) == 0
    run = RunDir.create(run.root, settings("eval.best=mean"))
    for number in (2, 3):
        finish(run, number, SCORES[number])
        update_best_and_remove_policies(run.stage(number))
    run.end.policy.mkdir()
    update_best_and_remove_policies(run.end)
    assert held(run) == 2 and not run.stage(2).policy.exists()
    resumed = RunDir.open(run.root)
    assert resumed.stage(0).run.recipe.eval.best == "first"
    for stage in [*resumed.stages(), resumed.end]:
        update_best_and_remove_policies(stage)
        assert held(run) == 2
        assert best_version(stage.run) == run.stage(2).first_update


def test_best_is_replaced_only_by_a_higher_score(settings, tmp_path):
    run = RunDir.create(tmp_path / "run", settings())
    finish(run, 1)
    finish(run, 2, (0.5, 0.5))
    keep_best(run)
    shutil.rmtree(run.stage(2).policy)
    # with equal scores the earlier policy is the best, but `best` has the only copy of the later one
    evaluate(run, 1, (0.5, 0.5))
    keep_best(run)
    assert best_version(run) == run.stage(1).first_update and held(run) == 2
    run.events.unlink()
    run = RunDir.open(run.root)
    evaluate(run, 1, (0.4, 0.5))  # the score of the policy in `best` is lost
    keep_best(run)
    assert held(run) == 2
    evaluate(run, 2, (0.3, 0.5))
    keep_best(run)
    assert held(run) == 1
