"""`megarl what-if` compares gradients of all objectives on stored batches, and with a fresh one.

Also `megarl export` and `megarl eval` of a single checkpoint.
"""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from megarl.commands.evaluate import describe_evaluations, export_policy
from megarl.commands.what_if import text_table, what_if
from megarl.errors import UserError
from megarl.estimates import mean_of_replicates
from megarl.objectives import OBJECTIVES
from megarl.phases.export import load_policy
from megarl.storage.run_dir import RunDir
from tests.commands.stages.made_up import sha
from tests.helpers import events, metrics, start_megarl, wait_until_held
from tests.phases.commands import settings, succeed, train

BATCHES, WEIGHTS = 2, "model.safetensors"


@pytest.fixture(scope="module")
def run(recipe):
    """A finished run of one stage of 6 updates, which keeps the checkpoints of all of them."""
    wanted = ("schedule.stages=1", "actor.checkpoint_every=1", "actor.keep_checkpoints=6", "eval.every_updates=4")
    train(recipe, recipe.with_name("run"), *settings(*wanted, "optimizer.lr=2e-3"))
    return RunDir.open(recipe.with_name("run"))


@pytest.fixture(scope="module")
def rows(run):
    """{(update, objective): row of `megarl what-if`} at the run's first policy and the one after 5 updates.

    The command must leave all files of the run as they are.
    """
    before = {path: path.lstat().st_mtime_ns for path in run.root.rglob("*")}
    asked = ("--stage", 0, "--update", 0, "--update", 5, "--batches", BATCHES)
    result = succeed("what-if", run.root, *asked, "--json")
    assert {path: path.lstat().st_mtime_ns for path in run.root.rglob("*")} == before
    assert "stage 1/1 what-if done in" in result.stderr
    return {(row["update"], row["objective"]): row for row in json.loads(result.stdout)}


def test_every_objective_has_a_row_at_every_policy(rows):
    assert set(rows) == {(update, name) for update in (0, 5) for name in ("fresh", *OBJECTIVES)}
    assert {row["batches"] for row in rows.values()} == {BATCHES}
    row = rows[0, "m2po"]
    mean, (low, high) = mean_of_replicates(np.array(row["values"]["norm"]))
    assert row["norm"] == pytest.approx([mean, low, high])
    lines = text_table(list(rows.values())).splitlines()
    assert max(map(len, lines)) <= 80
    kept, masked = (f"{row[name][0]:.3f}" for name in ("kept", "masked"))
    expected = ["m2po", kept, "-", "-", masked, f"{row['norm'][0]:.2g}±{row['norm'][2] - row['norm'][0]:.2g}"]
    assert next(line for line in lines if line.startswith("m2po ")).split()[:6] == expected


def test_on_fresh_data_every_gradient_is_that_of_grpo(rows):
    """Log-probs of the engine and of the actor differ by rounding, and so do the gradients.

    prefix_filter always takes out the share of tokens with the least likely prefixes.
    """
    for name in set(OBJECTIVES) - {"prefix_filter"}:
        assert min(rows[0, name]["values"]["cosine_to_grpo"]) == pytest.approx(1, abs=1e-6), name
        assert rows[0, name]["values"]["norm"] == pytest.approx(rows[0, "grpo"]["values"]["norm"], rel=1e-4), name


def test_on_stale_data_gradients_have_other_directions_than_grpos(rows):
    """Those of BAPO, CPPO and DCPO need not: the tokens that only they mask may be few."""
    same = {name for name in OBJECTIVES if min(rows[5, name]["values"]["cosine_to_grpo"]) > 0.9999}
    assert same <= {"grpo", "bapo", "cppo", "dcpo"}


def test_norm_and_statistics_are_those_that_the_run_logged_for_its_update(run, rows):
    """The last of the batches is the one on which the policy after 5 of 6 updates trained."""
    line, values = metrics(run)[5], rows[5, "mu_grpo"]["values"]
    assert line["staleness"] == 5
    assert values["norm"][-1] == pytest.approx(line["grad_norm"], rel=1e-4)
    assert values["ess"][-1] == pytest.approx(line["ess"], rel=1e-4)
    assert values["kept"][-1] == line["kept_fraction"]


def test_wrong_arguments_are_refused(run):
    for arguments, message in (((0, [], 7), "the stage has only 6 batches"), ((1, [], 3), "stages 0 to 0")):
        with pytest.raises(UserError, match=message):
            what_if(run.root, *arguments)


def test_a_policy_whose_checkpoint_is_gone_is_refused(run, tmp_path):
    stage = RunDir.open(shutil.copytree(run.root, tmp_path / "run", symlinks=True)).stage(0)
    shutil.rmtree(stage.checkpoints / "update_000003")
    only = "--update 3: .* these updates of the run only: 0, 1, 2, 4, 5, 6; .*keep_checkpoints"
    with pytest.raises(UserError, match=only):
        what_if(stage.run.root, 0, [3], 3)
    with pytest.raises(UserError, match=only):
        export_policy(stage.run.root, 0, 3, tmp_path / "policy")
    with pytest.raises(UserError, match="no checkpoint of update 3 any more"):  # removed after the command had looked
        load_policy(None, stage, 3)


def test_the_exported_policy_of_the_last_checkpoint_is_the_final_policy(run, tmp_path):
    succeed("export", run.root, "--stage", 0, "--update", 6, "--output", tmp_path / "end")
    assert sha(tmp_path / "end" / WEIGHTS) == sha(run.final / WEIGHTS)
    with pytest.raises(UserError, match="--adapters: .* its recipe has no"):
        export_policy(run.root, 0, 6, tmp_path / "adapters", adapters=True)
    with pytest.raises(UserError, match="exists already"):
        export_policy(run.root, 0, 6, tmp_path / "end")


def test_the_evaluation_of_an_exported_policy_equals_that_of_the_run(run, tmp_path):
    """With eval.every_updates = 4 the run itself has evaluated its policy after 4 of 6 updates."""
    (event,) = [event for event in events(run, "evaluation") if event["update"] == 4]
    policy = tmp_path / "policy"
    succeed("export", run.root, "--stage", 0, "--update", 4, "--output", policy)
    result = succeed("eval", policy, "--recipe", run.root / "recipe.toml", "--json")
    (listed,) = json.loads(result.stdout.splitlines()[-1])
    assert (listed["accuracy"], listed["ci95"]) == (event["accuracy"], event["ci95"])
    assert f"avg@1 {event['accuracy']:.4f}" in describe_evaluations([listed])
    assert sha(policy / WEIGHTS) != sha(run.final / WEIGHTS)


def test_an_interrupt_ends_the_command_at_once(run, tmp_path):
    """It does not wait for the hour that processes get to save: it has nothing to save."""
    patient = {**os.environ, "MEGARL_SHUTDOWN_SECONDS": "3600"}
    hold = [r"open .*/checkpoints/update_\d+/", 1, str(tmp_path / "held")]
    parent = start_megarl("what-if", run.root, "--stage", 0, "--batches", 6, env=patient, hold=hold)
    wait_until_held(parent, tmp_path / "held")
    parent.send_signal(signal.SIGINT)
    assert parent.wait(300) == 130
    assert "stopping\n" in parent.stderr and "Traceback" not in parent.stderr
