"""Fixtures that run live stages of a tiny Qwen3-MoE, one phase at a time."""

import itertools
import json

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir
from megarl.workers.launcher import Here
from megarl.workers.nodes import NodeRank, Nodes
from megarl.workers.processes import Starter, supervise
from tests.helpers import write_recipe
from tests.zygote import call_held

PROMPTS = ["".join(letters) for letters in itertools.product("abc", repeat=7)]


@pytest.fixture(scope="session")
def recipe(guessing_model, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"), guessing_model, PROMPTS)


class Holding(Starter):
    """Starts phases whose processes are held at a file operation."""

    hold = None  # the arguments of `tests.zygote.hold`

    def _fork(self, calls, recipe, trains):
        held = [(call_held, (self.hold, *call)) for call in calls] if self.hold else calls
        return super()._fork(held, recipe, trains)


class Phases:
    """Starts single phases in the same way as the launcher."""

    def __init__(self):
        self.nodes, self.numbers = Nodes(NodeRank(), Holding()), itertools.count()

    def start(self, run, phase, stage=0, hold=None):
        """Start a phase; returns the ids of its processes, trainers first.

        hold: (pattern, count) of the file operation at which a process of the phase is held until it is released.
        """
        self.marker = run.root.with_name(f"{run.root.name} held")
        self.marker.unlink(missing_ok=True)
        self.nodes.starter.hold = [*hold, str(self.marker)] if hold else None
        where = run.stage(stage)
        actor, workers = run.recipe.actor.processes_per_node, where.rollout.workers
        processes = {"live": actor + workers, "optimize": actor, "rollout": workers}[phase]
        self.logs = run.logs / f"{next(self.numbers):04d}"
        self.logs.mkdir(parents=True)
        self.started = Here(self.nodes, where, phase, processes, self.logs, self.logs).start()
        return self.started.pids

    def wait_until_held(self):
        while not (self.marker.exists() and self.marker.read_text()):
            assert len(self.started.poll(0.01)) < len(self.started.pids), "the phase ended before that"

    def release(self):
        self.marker.write_text("")

    def wait(self):
        """Wait for the end of the phase; returns the exit codes, trainers first."""
        codes = supervise(self.started).codes
        return [codes[index] for index in sorted(codes)]

    def __call__(self, run, phase, stage=0):
        self.start(run, phase, stage)
        codes = self.wait()
        logs = "\n".join(path.read_text() for path in sorted(self.logs.glob("*.log"))) if any(codes) else ""
        assert not any(codes), f"{codes}\n{logs}"


@pytest.fixture(scope="session")
def phases():
    running = Phases()
    with running.nodes:
        yield running


def make_run(root, recipe, settings):
    """A run directory with its first policy. settings: as of `new_run`."""
    overrides = [
        f"{key.replace('__', '.') if '__' in key else 'schedule.' + key}={json.dumps(value)}"
        for key, value in settings.items()
    ]
    run = RunDir.create(root, load_recipe(recipe, overrides))
    copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.stage(0).policy)
    return run


@pytest.fixture
def new_run(recipe, tmp_path):
    """A function that makes a run directory with its first policy.

    A setting is a key of [schedule], or of another table if it has the form table__key.
    """
    return lambda name, **settings: make_run(tmp_path / name, recipe, settings)


def histogram(updates):
    """{lag: number of response tokens} of all ``updates`` together."""
    total = {}
    for update in updates:
        for lag, tokens in update["staleness/tokens"].items():
            total[int(lag)] = total.get(int(lag), 0) + tokens
    return total
