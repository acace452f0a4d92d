"""`megarl what-if`: gradients of all objectives on stored batches, beside each other and beside fresh ones."""

import json

import numpy as np
import pytest

from megarl.estimates import mean_of_replicates
from megarl.objectives import OBJECTIVES
from megarl.storage.run_dir import RunDir
from tests.helpers import megarl, metrics

BATCHES = 3


@pytest.fixture(scope="module")
def run(recipe):
    """A run of one stage of 6 updates with every checkpoint."""
    target = recipe.with_name("run")
    result = megarl(
        "train", recipe, "--run-dir", target,
        "--set", "schedule.stages=1", "--set", "actor.checkpoint_every=1", "--set", "actor.keep_checkpoints=6",
        "--set", "optimizer.lr=2e-3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return RunDir.open(target)


@pytest.fixture(scope="module")
def rows(run, tmp_path_factory):
    figure = tmp_path_factory.mktemp("figure") / "figure.html"
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    result = megarl(
        "what-if", run.root, "--stage", 0, "--update", 0, "--update", 5, "--batches", BATCHES, "--json",
        "--figure", figure,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert {path: path.stat().st_mtime_ns for path in run.root.rglob("*")} == before
    assert "Cosine to a fresh on-policy gradient" in figure.read_text()
    return {(row["update"], row["objective"]): row for row in json.loads(result.stdout)}


def test_every_objective_has_a_row_at_every_policy(rows):
    assert set(rows) == {(update, name) for update in (0, 5) for name in ("fresh", *OBJECTIVES)}
    assert {row["batches"] for row in rows.values()} == {BATCHES}


# at ratio 1 these do something else by design
OTHER_AT_RATIO_1 = {"prefix_filter": "always takes out the share of tokens with the least likely prefixes"}


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - set(OTHER_AT_RATIO_1)))
def test_on_fresh_data_every_objective_has_the_gradient_of_grpo(rows, name):
    """Log-probs of the engine and of the actor differ by rounding, and so do the gradients."""
    assert min(rows[0, name]["values"]["cosine_to_grpo"]) == pytest.approx(1, abs=1e-6)


def test_on_stale_data_they_differ(rows):
    others = [rows[5, name]["cosine_to_grpo"][0] for name in OBJECTIVES if name not in ("grpo", "dapo")]
    assert min(others) < 0.9999


def test_the_run_itself_made_its_update_with_this_gradient(run, rows):
    """The last batch is the one that the policy after 5 of 6 updates trained on."""
    line, values = metrics(run)[5], rows[5, "mu_grpo"]["values"]
    assert line["staleness"] == 5
    assert values["norm"][-1] == pytest.approx(line["grad_norm"], rel=1e-4)
    assert values["ess"][-1] == pytest.approx(line["ess"], rel=1e-4)
    assert values["kept"][-1] == line["kept_fraction"]


def test_intervals_are_over_batches(rows):
    row = rows[5, "grpo"]
    mean, (low, high) = mean_of_replicates(np.array(row["values"]["norm"]))
    assert row["norm"] == pytest.approx([mean, low, high])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--update", 7), "the policies after updates 0, 1, 2, 3, 4, 5, 6"),
        (("--batches", 7), "the stage has 6"),
        (("--stage", 1), "stages 0 to 0"),
    ],
)
def test_mistakes_are_named(run, arguments, message):
    result = megarl("what-if", run.root, "--stage", 0, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
