"""Live stages of a tiny Qwen3-MoE in processes that are forks of one: see zygote.py."""

import itertools
import json
import subprocess
import sys

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir
from megarl.workers.nodes import NodeRank, _open_store
from tests.helpers import ROOT, events, metrics, write_recipe  # noqa: F401 - the tests import these from here

PROMPTS = ["".join(letters) for letters in itertools.product("abcdef", repeat=4)]


@pytest.fixture(scope="session")
def recipe(tiny_model, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"), tiny_model, PROMPTS)


class Phases:
    """Starts phases in forks of the zygote; a TCP store on loopback stands for the launcher's."""

    def __init__(self):
        self.store, self.port = _open_store(NodeRank())
        command = [sys.executable, "-W", "ignore", "-m", "tests.live.zygote"]
        self.zygote = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.attempts = 0

    def start(self, run, phase, stage=0):
        """The process ids, trainers first."""
        self.attempts += 1
        actor, workers = run.recipe.actor.processes_per_node, run.recipe.rollout_of(stage).workers
        processes = {"live": actor + workers, "optimize": actor, "rollout": workers}[phase]
        order = {"phase": phase, "run": str(run.root), "stage": stage, "processes": processes, "port": self.port}
        print(json.dumps(order | {"attempt": self.attempts}), file=self.zygote.stdin, flush=True)
        return json.loads(self.zygote.stdout.readline())

    def wait(self):
        """Exit codes, trainers first."""
        return json.loads(self.zygote.stdout.readline())

    def __call__(self, run, phase, stage=0):
        self.start(run, phase, stage)
        codes = self.wait()
        logs = "\n".join(path.read_text() for path in sorted(run.root.glob("process_*.log"))) if any(codes) else ""
        assert not any(codes), f"{codes}\n{logs}"

    def close(self):
        self.zygote.stdin.close()
        self.zygote.wait()


@pytest.fixture(scope="session")
def phases():
    running = Phases()
    yield running
    running.close()


@pytest.fixture
def new_run(recipe, tmp_path):
    """A run directory with its first policy; settings as for ``--set``, all of them of [schedule] unless dotted."""

    def make(name, **settings):
        overrides = [
            f"{key.replace('__', '.') if '__' in key else 'schedule.' + key}={json.dumps(value)}"
            for key, value in settings.items()
        ]
        run = RunDir.create(tmp_path / name, load_recipe(recipe, overrides))
        copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.policy(0))
        return run

    return make


def histogram(updates):
    """{lag: tokens} over updates."""
    total = {}
    for update in updates:
        for lag, tokens in update["staleness/tokens"].items():
            total[int(lag)] = total.get(int(lag), 0) + tokens
    return total
