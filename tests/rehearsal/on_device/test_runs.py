"""Whole runs with ``backend = "cuda"``: the command line, its warm process and the phases see the device."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import ROOT, events, metrics, write_recipe
from tests.rehearsal.forks import in_fork

CUDA = ["--set", 'actor.backend="cuda"', "--set", 'actor.kernels="cuda"']


@pytest.fixture(scope="module")
def recipe(tiny_model, tmp_path_factory):
    words = ["".join(letters) for letters in itertools.product("abcde", repeat=3)]
    return write_recipe(tmp_path_factory.mktemp("recipe"), tiny_model, words)


def command(*arguments: object) -> None:
    """In a fork: a command line, whose phases are forks of it, as those of the real one are of the warm process."""
    from megarl import cli
    from megarl.workers import processes
    from tests.zygote import ForkedWarmProcess

    os.setsid()
    os.chdir(ROOT)
    processes.WarmProcess = ForkedWarmProcess
    cli.main([str(x) for x in arguments])


def megarl(*arguments: object) -> None:
    in_fork(lambda: command(*arguments))


def start_megarl(*arguments: object) -> int:
    """The same without waiting: the process id."""
    if pid := os.fork():
        return pid
    try:
        command(*arguments)
    finally:
        os._exit(0)


def test_train_and_optimize_elsewhere(recipe, tmp_path):
    """Two stages with evaluations, the built-in engine and its drift check; then a stage again over two ranks."""
    from megarl.storage.run_dir import RunDir

    megarl("train", recipe, "--run-dir", tmp_path / "run", *CUDA)
    run = RunDir.open(tmp_path / "run")
    lines = metrics(run)
    assert [line["update"] for line in lines] == list(range(1, 13))
    assert len(events(run, "evaluation")) == 3 and len(events(run, "export")) == 2
    weights = load_file(run.final / "model.safetensors")
    assert all(torch.isfinite(x).all() for x in weights.values())
    ranks = ["--set", "actor.processes_per_node=2", "--set", "actor.tensor_parallel=2"]
    megarl("optimize", run.root, "--stage", "0", "--output", tmp_path / "other", *ranks)
    for ours, theirs in zip(metrics(RunDir.open(tmp_path / "other")), lines, strict=False):
        assert ours["entropy"] == pytest.approx(theirs["entropy"], abs=0.02)
        assert ours["ratio/mean"] == pytest.approx(theirs["ratio/mean"], abs=0.02)
        assert abs(ours["ratio/mean"] - 1) < 0.05  # the actor agrees with the engine


def test_a_stop_and_what_continues_after_it(recipe, tmp_path):
    from megarl.storage.run_dir import RunDir

    arguments = ["train", recipe, "--run-dir", tmp_path / "run", *CUDA]
    pid = start_megarl(*arguments)
    while not list(tmp_path.glob("run/stages/000/checkpoints/update_000002")):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before"
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    run = RunDir.open(tmp_path / "run")
    assert 2 <= len(metrics(run)) <= 6 and not run.final.exists()
    megarl(*arguments)
    assert [line["update"] for line in metrics(run)] == list(range(1, 13))
    assert run.final.exists() and (events(run, "resume") or events(run, "phase_stopped"))
