"""More stages and updates than numbers in file names have digits for; work that grows with what is new alone."""

from pathlib import Path

import pytest

from megarl.recipe.load import dump_recipe
from megarl.storage import json_lines, ledger
from megarl.storage.best import update_best_and_remove_policies
from megarl.storage.checkpoints import checkpoint_path, checkpoints
from megarl.storage.rollouts import RolloutStore, RolloutWriter
from megarl.storage.run_dir import RunDir
from tests.storage.sample_rollouts import POLICY, make_group
from tests.views.synthetic_run import make_recipe


@pytest.fixture
def run(tmp_path):
    recipe = make_recipe({"stages": 1200, "updates_per_stage": 2})
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    return RunDir(tmp_path, recipe)


def test_names_have_as_many_digits_as_they_need(run):
    for stage in (7, 999, 1000, 1199):
        run.version(2 * stage + 1).mkdir(parents=True)
    assert run.versions() == [15, 1999, 2001, 2399]
    assert run.version(2001).parent.parent == run.stage(1000).directory == run.root / "stages/1000"
    for update in (1_000_000, 64, 999_999):
        checkpoint_path(run.root, update).mkdir()
    assert [update for update, _ in checkpoints(run.root)] == [64, 999_999, 1_000_000]


@pytest.fixture
def decoded(monkeypatch):
    """Counts the lines of JSON that are read."""
    lines = []
    for module in (json_lines, ledger):
        right = module.decode
        monkeypatch.setattr(
            module, "decode", lambda line, right=right, **options: (lines.append(line), right(line, **options))[1]
        )
    return lines


def test_events_are_read_once_however_often_a_stage_is_asked_for(run, decoded):
    for stage in range(1200):
        run.log_event("evaluation", stage=stage, accuracy=stage / 1200)
        assert run.stage(stage).evaluation()["accuracy"] == stage / 1200
    assert run.stage(3).evaluation()["accuracy"] == 3 / 1200 and run.stage(1200).evaluation() is None
    assert len(decoded) == 1200


def test_a_store_that_grows_is_read_once(tmp_path, decoded):
    with RolloutWriter(tmp_path / "store", **POLICY) as writer:
        writer.append([make_group(0)])
        store = RolloutStore(tmp_path / "store")
        for number in range(1, 200):
            writer.append([make_group(number)])
            store.refresh()
            assert store.group_ids[-1] == number
    assert store.group_ids == list(range(200)) == [entry.groups[0] for entry in store.entries]
    assert len(decoded) <= 202  # the writer's own first look too


def test_each_stage_looks_at_the_directory_of_the_one_before_alone(run, monkeypatch):
    settings = run.recipe.eval.model_copy(update={"every_updates": 1})
    run = RunDir(run.root, run.recipe.model_copy(update={"eval": settings}))
    for stage in range(1200):
        run.version(2 * stage + 1).mkdir(parents=True)
    looked_at, right = [], Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: (looked_at.append(path / pattern), right(path, pattern))[1])
    stage = run.stage(700)
    assert stage.due_evaluations() == [1399, 1400]
    run.log_event("evaluation", stage=700, update=1399, accuracy=0.5)
    update_best_and_remove_policies(stage)
    assert not run.version(1399).exists() and run.version(1397).exists() and run.version(1401).exists()
    there = [path for path in looked_at if run.root / "stages" in path.parents]
    assert there == [run.stage(699).directory / "policies/[0-9]*"] * 2
