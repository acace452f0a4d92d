"""The report on branches and paired gains, and the warning of a run that learns nothing."""

import json

import pytest

from megarl.phases.generation import SAME_REWARDS
from megarl.storage.metrics import UPDATES, LearningWatch, find
from megarl.storage.run_dir import RunDir
from megarl.views.report import summary
from megarl.views.run_reader import read_run
from tests.helpers import events, five_letters, read_lines, write_recipe
from tests.phases.commands import settings, succeed, train
from tests.views.synthetic_run import make_branch, make_run, write_lines

GOOD = {"reward/mean": 0.5, "zero_variance_fraction": 0.5, "grad_norm": 0.1, "entropy": 1.0, "ess": 0.9}


@pytest.mark.parametrize(("stage", "base", "final"), [(0, "0.281", "0.613"), (1, "0.613", "0.815")])
def test_a_branch_is_finished_after_its_stage_and_its_base_is_the_policy_before(tmp_path, stage, base, final):
    whole = make_run(tmp_path / "whole")
    run = read_run(make_branch(tmp_path / "branch", whole, stage), "branch")
    row = summary(run)
    assert (run.notes, row["Updates"]) == ([], "96 / 96")
    assert row["Base accuracy"].startswith(base) and row["Final accuracy"].startswith(final)
    write_lines(run.root / "metrics.jsonl", run.updates[:-1])
    assert read_run(run.root, "branch").notes == ["not finished: 95 of 96 updates"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"zero_variance_fraction": 1.0, "reward/mean": 0.0}, "equal_rewards"),
        ({"grad_norm": 0.0}, "no_gradient"),
        ({"entropy": 1e-4}, "no_entropy"),
        ({"ess": 0.01}, "no_sample"),
    ],
)
def test_a_cause_is_found_only_if_every_update_shows_it(values, kind):
    records = [GOOD | values for _ in range(UPDATES)]
    assert list(find(records)) == [kind]
    records = [record | {"reward/mean": 0.1 * n} for n, record in enumerate(records)]
    assert list(find(records)) == ["no_variance" if kind == "equal_rewards" else kind]
    for record in (GOOD, {"skipped_update": 1.0}):
        assert find([*records[1:], record]) == {}


def test_a_cause_is_logged_once_per_stage(tmp_path):
    watch = LearningWatch(tmp_path / "events.jsonl")
    for update in range(1, 4 * UPDATES + 1):
        watch.append({"update": update, "stage": (update - 1) // (2 * UPDATES)} | GOOD | {"ess": 0.001})
    found = [(event["stage"], event["first"], event["update"]) for event in read_lines(tmp_path / "events.jsonl")]
    assert found == [(0, 1, UPDATES), (1, UPDATES + 2, 2 * UPDATES + 1)]


def test_a_run_that_learns_nothing_says_so_on_the_screen_in_events_and_in_the_report(tiny_model, tmp_path):
    """The untrained model never answers with the letter that is asked for."""
    recipe = write_recipe(tmp_path, tiny_model, five_letters())
    wanted = (f"schedule.updates_per_stage={UPDATES}", f"schedule.prompts_per_update={SAME_REWARDS // UPDATES}")
    result = train(recipe, tmp_path / "run", *settings("schedule.stages=1", "eval.every=0", *wanted))
    run = RunDir.open(tmp_path / "run")
    said = f"learns nothing, updates 1 to {UPDATES}: the responses to each prompt had equal rewards, 0 on average in"
    assert said in result.stdout + result.stderr
    assert [event["kind"] for event in events(run, "learns_nothing")] == ["equal_rewards"]
    (warning,) = events(run, "equal_rewards")
    assert warning["groups"] == SAME_REWARDS and warning["warning"] in result.stdout + result.stderr
    assert "0.000 on average" in warning["warning"]
    notes = (run.root / "report.html").read_text().partition('<ul class="notes">')[2].partition("</ul>")[0]
    assert said in notes
    assert json.dumps(read_run(run.root, "run").notes).count("learns nothing") == 1


def test_the_last_line_and_the_report_have_the_paired_interval_of_compare(recipe, tmp_path):
    root = tmp_path / "run"
    wanted = ("schedule.stages=1", "schedule.updates_per_stage=4", "optimizer.lr=0.01", "run.seed=1")
    said = train(recipe, root, *settings(*wanted))
    (compared,) = json.loads(succeed("compare", f"{root}:0", f"{root}:4", "--json").stdout)
    estimate = compared["estimates"][0]
    low, high = estimate["ci95"]
    text = f"{estimate['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert f": {text} (95 %, paired over 16 prompts)" in said.stdout
    assert text in (root / "report.html").read_text()
