"""Runs of a tiny Qwen3-MoE, live ones for the most part."""

import itertools
import json

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from tests.helpers import write_recipe
from tests.phases.commands import train

PROMPTS = ["".join(letters) for letters in itertools.product("abc", repeat=7)]


@pytest.fixture(scope="session")
def recipe(guessing_model, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"), guessing_model, PROMPTS)


def make_run(root, recipe, settings):
    """A run directory without anything but its recipe. settings: as of `new_run`."""
    overrides = [
        f"{key.replace('__', '.') if '__' in key else 'schedule.' + key}={json.dumps(value)}"
        for key, value in settings.items()
    ]
    return RunDir.create(root, load_recipe(recipe, [*overrides, "eval.every=0"]))


@pytest.fixture
def new_run(recipe, tmp_path):
    """A function that makes a run directory.

    A setting is a key of [schedule], or of another table if it has the form table__key.
    """
    return lambda name, **settings: make_run(tmp_path / name, recipe, settings)


def go_on(run, *until, code=0):
    """Start or continue such a run."""
    return train(run.root / "recipe.toml", run.root, *until, code=code)


def histogram(updates):
    """{lag: number of response tokens} of all ``updates`` together."""
    total = {}
    for update in updates:
        for lag, tokens in update["staleness/tokens"].items():
            total[int(lag)] = total.get(int(lag), 0) + tokens
    return total
