"""Long runs: numbers with more digits than usual, and work that grows only with what is new."""

import pytest

from megarl.recipe.load import dump_recipe
from megarl.storage import checked_json
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
    """A list to which every decoded line of JSON is appended."""
    lines, right = [], checked_json.decode
    monkeypatch.setattr(checked_json, "decode", lambda line, **o: lines.append(line) or right(line, **o))
    return lines


def test_each_ledger_line_of_a_growing_store_is_decoded_once(tmp_path, decoded):
    with RolloutWriter(tmp_path / "store", **POLICY) as writer:
        writer.append([make_group(0)])
        store = RolloutStore(tmp_path / "store")
        for number in range(1, 200):
            writer.append([make_group(number)])
            store.refresh()
            assert store.group_ids[-1] == number
    assert store.group_ids == list(range(200)) == [entry.groups[0] for entry in store.entries]
    assert len(decoded) <= 202  # 200 lines, and at most two that the writer decodes itself
