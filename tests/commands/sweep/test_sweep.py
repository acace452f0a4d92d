"""`megarl sweep`: its runs equal those of single commands, a killed sweep continues, and its table is right."""

import csv
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.commands.sweep import _make, describe, sweep
from megarl.commands.sweep.plan import plan_sweep
from megarl.errors import Busy, UserError
from megarl.estimates import interval, paired
from megarl.recipe.sweep import load_sweep
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.evaluations import SuiteResponses
from tests.helpers import events, metrics, processes_with_files_in
from tests.phases.commands import settings, succeed
from tests.phases.test_kill import assert_same_weights, kill_command

SWEEP = Path(__file__).with_name("sweep.toml").read_text()


@pytest.fixture(scope="module")
def swept(recipe):
    """A sweep that was killed in its first branch and then started twice more.

    (sweep file, its output directory, result of a dry run, result of the second start, result of the third).
    """
    file = recipe.with_name("sweep.toml")
    file.write_text(SWEEP.format(recipe=recipe))
    output = recipe.with_name("sweep")
    dry = succeed("sweep", file, "--dry-run")
    assert not output.exists()
    moment = r"open .*/grpo/seed_3/.*/checkpoints/\.update_000004\..*\.tmp/."
    kill_command(moment, 1, output, "sweep", file)
    return file, output, dry, succeed("sweep", file), succeed("sweep", file, "--json")


def run_of(output, name):
    return RunDir.open(output / name)


def test_a_dry_run_counts_and_lists_the_runs(swept):
    head, *lines = swept[2].stdout.splitlines()
    assert head.startswith("4 runs (2 points, 2 of each), on the rollouts of 2 more; 0 of 6 are done")
    assert [line.split()[:3] for line in lines[:2]] == [["to", "do", "base/seed_3"], ["to", "do", "base/seed_4"]]
    assert "grpo/seed_3" in lines[2] and "objective.name=grpo" in lines[2]


def test_a_killed_sweep_continues_and_finished_runs_are_not_repeated(swept):
    _, output, _, resumed, again = swept
    run = run_of(output, "grpo/seed_3")
    assert [event["skipped"] for event in events(run, "resume")] != []
    assert [line["update"] for line in metrics(run)] == list(range(1, 5))
    assert "2 of 6 are done" in resumed.stderr and "[4/4]" in resumed.stderr and "6 of 6 are done" in again.stderr
    for name in ("mu_grpo/seed_3", "mu_grpo/seed_4", "grpo/seed_4"):
        assert [event["phase"] for event in events(run_of(output, name), "phase_end")] == ["optimize", "evaluate"]
    for seed in (3, 4):
        base = run_of(output, f"base/seed_{seed}")
        assert [event["phase"] for event in events(base, "phase_end")] == ["rollout"]
    assert not processes_with_files_in(output)


def test_a_run_has_the_weights_that_megarl_optimize_alone_gives(swept, tmp_path):
    _, output, *_ = swept
    changes = settings("objective.name=grpo", "objective.eps_low=0.1")
    succeed("optimize", output / "base/seed_3", "--stage", 0, "--output", tmp_path / "alone", *changes)
    assert_same_weights(tmp_path / "alone/final", output / "grpo/seed_3/final")


def test_a_link_to_an_existing_run_takes_the_place_of_a_generated_one(swept, tmp_path):
    """The sweep plans the same branches of its stage."""
    file, output, *_ = swept
    (tmp_path / "sweep/base").mkdir(parents=True)
    (tmp_path / "sweep/base/seed_3").symlink_to(output / "base/seed_3")
    axes = "[axes.objective]" + SWEEP.split("[axes.objective]")[1].format()
    (tmp_path / "sweep.toml").write_text(f'recipe = "{output}/base/seed_3/recipe.toml"\nstage = 0\n{axes}')
    base, ours, _ = plan_sweep(load_sweep(tmp_path / "sweep.toml"), tmp_path / "sweep").all
    (of_seed,) = (job for job in plan_sweep(load_sweep(file), output).all if job.name == "grpo/seed_3")
    assert base.is_done() and (ours.name, ours.is_possible()) == ("grpo/seed_3", True)
    assert ours.recipe == of_seed.recipe


PROMPTS = 16  # of an evaluation, each of which gets one response


def scores_of(output, point, seed):
    groups = SuiteResponses.of(output / f"{point}/seed_{seed}", "heldout").read(4)
    scores = [response.correctness for group in groups for response in group.responses]
    assert len(scores) == PROMPTS
    return scores


def wider(values, prompts):
    """The interval of two seeds with the same prompts, by Student's t with one degree of freedom and over
    prompts: the distances from the mean add as those of independent errors do."""
    mean, student = np.mean(values), math.tan(0.475 * math.pi) * abs(values[0] - values[1]) / 2
    low, high = (math.hypot(student, mean - other) for other in prompts)
    return mean, mean - low, mean + high


def test_the_table_has_means_and_paired_intervals_over_seeds(swept):
    _, output, _, _, again = swept
    points, first, last, scores = ("grpo", "mu_grpo"), {}, {}, {}
    for point in points:
        found = [[e["accuracy"] for e in events(run_of(output, f"{point}/seed_{s}"), "evaluation")] for s in (3, 4)]
        first[point], last[point] = np.transpose(found)
        scores[point] = np.mean([scores_of(output, point, seed) for seed in (3, 4)], axis=0)
    rows = json.loads(again.stdout)
    for row, point in zip(rows, points, strict=True):
        assert (row["objective"], row["replicates"]) == (point, 2)
        mean, low, high = wider(last[point], interval(scores[point], 2))  # responses to a prompt, of both seeds
        expected = (mean, max(low, 0), min(high, 1), (last[point] - first[point]).mean())
        found = [row[k] for k in ("accuracy", "accuracy_low", "accuracy_high", "gain")]
        assert found == pytest.approx(expected, abs=1e-5)
    assert rows[0]["difference"] is None
    expected = wider(last["mu_grpo"] - last["grpo"], paired(*scores.values()).ci95)
    assert [rows[1][f"difference{k}"] for k in ("", "_low", "_high")] == pytest.approx(expected, abs=1e-5)
    lines = csv.DictReader((output / "runs.csv").open())
    found = {(line["objective"], line["replicate"], line["update"]) for line in lines}
    assert found == set(itertools.product(points, ("seed_3", "seed_4"), "04"))


def test_a_failed_run_does_not_stop_the_others_and_is_still_to_do(swept):
    file, output, *_ = swept
    more = file.with_name("more.toml")
    points = "\n".join(f"{name} = {{ optimizer = {{ lr = {lr} }} }}" for name, lr in (("new", 1e-4), ("newer", 2e-4)))
    more.write_text(f"{file.read_text()}\n{points}\n".replace("[3, 4]", "[3]"))
    (output / "new").mkdir()
    (output / "new/seed_3").write_text("in the way")
    failed = succeed("sweep", more, "--output", output, code=2)
    assert "1 runs failed; start the same command again to retry them:" in failed.stderr
    assert f"new/seed_3: {output}/new/seed_3 is a file, not a run directory" in failed.stderr
    assert "newer" in failed.stdout and "mu_grpo" in failed.stdout
    (output / "new/seed_3").unlink()
    plan = describe(more, output)
    assert "4 of 5 are done" in plan and "to do  new/seed_3" in plan


def test_rollouts_that_another_sweep_generates_are_waited_for(monkeypatch):
    polls, made = [], []

    def ready():
        return len(polls) > 1

    base = SimpleNamespace(name="base/seed_0", until=0, source=None, is_done=ready)
    point = SimpleNamespace(name="grpo/seed_0", until=None, source=SimpleNamespace(is_sealed=ready))

    def make(nodes, job):
        if job is base:
            raise Busy("another process works on it")
        made.append(job.name)

    monkeypatch.setattr("megarl.commands.sweep._make_run", make)
    monkeypatch.setattr("megarl.commands.sweep.time.sleep", polls.append)
    assert _make(None, [base, point]) == {} and made == ["grpo/seed_0"] and len(polls) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds", "seed"), "did you mean 'seeds'?"),
        (("lr = 1e-3", "learning = 1"), "mu_grpo: the recipe is wrong"),
        (('baseline = "grpo"', 'baseline = "grp"'), "did you mean 'grpo'?"),
        (("stage = 0", "stage = 1"), "stages 0 to 0"),
        (("[3, 4]", "[3, 3]"), "twice"),
        (("lr = 1e-3 } }", "lr = 1e-3 }, run = { seed = 1 } }"), "set the seeds with seeds = [...] of the sweep"),
        (("optimizer = { lr = 1e-3 }", "rollout = { temperature = 2.0 }"), "the rollouts are reused: rollout.t"),
        (("mu_grpo =", '"a/b" ='), "cannot be part of a directory's name"),
        (("lr = 1e-3", "lr = 2e-3"), "has a run with other settings (old -> new): optimizer.lr: 0.001 -> 0.002"),
    ],
)
def test_a_mistake_in_the_sweep_file_is_refused_before_a_run_starts(swept, change, message):
    file, output, *_ = swept
    wrong = file.with_name("wrong.toml")
    assert change[0] in file.read_text()
    wrong.write_text(file.read_text().replace(*change))
    before = sorted(output.rglob("*"))
    with pytest.raises(UserError, match=re.escape(message)):
        sweep(wrong, output)
    assert sorted(output.rglob("*")) == before


def test_refused_settings_are_found_before_the_first_run(swept, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(swept[0].read_text().replace("optimizer = {", 'actor = { kernels = "cuda" }, optimizer = {'))
    said = succeed("sweep", wrong, "--output", tmp_path / "new", code=2).stderr
    assert "mu_grpo/seed_3" in said and "do not run on backend = 'cpu'" in said
    assert not list((tmp_path / "new").rglob("recipe.toml"))
