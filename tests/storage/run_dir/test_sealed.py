"""All that is read again of a finished run is sealed: a flipped bit is named, and nothing damaged is published."""

import itertools
import random
import shutil

import pytest

from megarl.errors import UserError
from megarl.storage.run_dir.checks import check, damages
from megarl.views.audit import audit
from tests.phases.commands import settings, succeed, train

PLACES, AUDITED = 100, 5


@pytest.fixture(scope="module")
def finished(recipe):
    """A run of two stages with evaluations, best/, final/, and an earlier recipe, since its samples changed."""
    run = recipe.parent / "run"
    train(recipe, run, "--until", "optimize:0", *settings("actor.checkpoint_every=3"))
    train(recipe, run, *settings("actor.checkpoint_every=3", "eval.samples=2"))
    return run


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the run without hard links between its files."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def files_of(run):
    """All files but those that are never read again, which have no checksum."""
    found = (path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in found if path.relative_to(run).parts[0] not in ("logs", ".lock", "report.html")]


def flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_policy_that_is_exported_again_costs_no_metrics(copy, recipe):
    shutil.rmtree(copy / "final")
    before = (copy / "metrics.jsonl").read_bytes()
    train(recipe, copy, *settings("actor.checkpoint_every=3", "eval.samples=2"))
    assert (copy / "final").exists() and (copy / "metrics.jsonl").read_bytes() == before


def test_a_flipped_bit_in_any_file_is_named_by_the_audit(copy):
    """A policy is named as a whole if its weights differ, since it has one checksum of all of them."""
    random_places, files, unnamed = random.Random(0), files_of(copy), []
    places = {path.relative_to(copy).parts[0] for path in files}
    assert {"best", "evaluations", "final", "stages", "recipe_until_001.toml"} <= places
    for number, path in enumerate(itertools.islice(itertools.cycle(files), max(PLACES, len(files)))):
        place, bit = random_places.randrange(path.stat().st_size), random_places.randrange(8)
        flip(path, place, bit)
        # mostly by the audit's own check of files alone, which takes a fraction of its time
        problems = damages(copy) if number % AUDITED else audit(copy, 0).problems
        found = [problem for problem in problems if str(path.parent) in problem]
        if not any(path.name in problem or f"weights in {path.parent} do not" in problem for problem in found):
            unnamed.append((path.relative_to(copy), place, bit))
        flip(path, place, bit)
    assert unnamed == []
    assert audit(copy, 0).problems == []


def test_flipped_weights_of_the_best_policy_are_not_evaluated(copy):
    path = copy / "best/model.safetensors"
    flip(path, path.stat().st_size // 2, 3)
    with pytest.raises(UserError, match="the weights in .*best do not match their checksum"):
        check(copy / "best", "")
    assert "do not match" in succeed("eval", copy / "best", "--recipe", copy / "recipe.toml", code=2).stderr
