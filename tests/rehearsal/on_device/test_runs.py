"""Whole runs with ``backend = "cuda"``: the command line, its fork server and the phases see the device."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT, events, metrics, read_lines
from tests.phases.commands import settings
from tests.rehearsal.forks import in_fork

# kernels are slow here; `test_the_commands_of_the_readme_work` has them
CUDA = settings('actor.backend="cuda"', 'actor.kernels="torch"')
SHORT = settings("schedule.stages=1", "schedule.updates_per_stage=3", "eval.every=0")


def command(*arguments: object, folder: Path = ROOT) -> None:
    """Run a command line in this fork. Its phases are forks of it, as those of runs on CPUs are of a fork server."""
    from megarl import cli
    from megarl.workers import processes
    from tests.zygote import new_fork_server

    os.setsid()
    os.chdir(folder)
    new_fork_server()
    processes.NEW = processes.FORK
    cli.main([str(x) for x in arguments])


def megarl(*arguments: object, folder: Path = ROOT) -> None:
    in_fork(lambda: command(*arguments, folder=folder))


def kill_at(checkpoint: Path, *arguments: object, folder: Path = ROOT) -> None:
    if not (pid := os.fork()):
        try:
            command(*arguments, folder=folder)
        finally:
            os._exit(0)
    while not checkpoint.exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run has ended"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_broken_actor_ends_the_run_before_any_rollout(recipe, tmp_path, monkeypatch, capfd):
    from megarl.actor import checkpoint

    whole = checkpoint.sharded_adam_state

    def without_master_weights(*arguments):
        return {key: piece for key, piece in whole(*arguments).items() if ".parameter." not in key}

    monkeypatch.setattr(checkpoint, "sharded_adam_state", without_master_weights)
    with pytest.raises(AssertionError, match="SystemExit: 1"):
        megarl("train", recipe, "--run-dir", tmp_path / "run", *CUDA)
    said = capfd.readouterr().err
    assert "megarl: the rehearsal failed" in said and "nothing was generated" in said
    assert "a checkpoint does not restore master weights" in said
    run = tmp_path / "run"
    assert not (run / "stages/000/rollouts").exists() and not (run / "rehearsal").exists()
    assert not [line for line in (run / "events.jsonl").read_text().splitlines() if '"rollout"' in line]


def test_doctor_runs_only_the_rehearsal_of_a_recipe(recipe, tmp_path, capfd):
    ranks = settings("actor.processes_per_node=2", "actor.expert_parallel=2")
    megarl("doctor", "--recipe", recipe, "--scratch", tmp_path / "scratch", *CUDA, *ranks)
    assert "updates, their export and a checkpoint passed in" in capfd.readouterr().out
    assert not list(tmp_path.glob("scratch/*"))


def lose_connections_twice(monkeypatch, folder: Path) -> None:
    """In the first two attempts rank 1 loses its connections before a collective, which fails on rank 0, and dies."""
    import torch.distributed as dist

    from megarl.actor import step

    whole = step._norm_and_finite

    def fails(*arguments):
        if dist.get_rank() == 1 and len(list(folder.iterdir())) < 2:
            (folder / str(os.getpid())).touch()
            store = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.getpeername()[1] != int(os.environ["MASTER_PORT"]):
                        connection.shutdown(socket.SHUT_RDWR)
            while not store.check(["exception_dump"]):  # of rank 0, in whose store it must not stay
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments)

    monkeypatch.setattr(step, "_norm_and_finite", fails)


def test_a_phase_is_started_again_after_errors_of_nccl(recipe, tmp_path, monkeypatch):
    from megarl.storage.run_dir import RunDir

    failures = tmp_path / "failures"
    failures.mkdir()
    lose_connections_twice(monkeypatch, failures)
    ranks = ("actor.processes_per_node=2", "actor.tensor_parallel=2", "run.rehearse=false", "run.max_restarts=2")
    megarl("train", recipe, "--run-dir", tmp_path / "run", *CUDA, *settings(*ranks), *SHORT)
    run = RunDir.open(tmp_path / "run")
    assert len(events(run, "restart")) == len(list(failures.iterdir())) == 2
    assert [line["update"] for line in metrics(run)] == [1, 2, 3] and run.final.exists()


READ_BY_CUDA = ("RANK", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")


def test_each_engine_has_its_device(recipe, tmp_path, monkeypatch):
    """No process initialises CUDA before it has set what CUDA and torch read then. The engines start as vLLM's do."""
    from megarl.rollout import builtin, vllm
    from megarl.rollout.continuous import Settings

    initialise = torch._C._cuda_init

    def noting():
        with open(tmp_path / "starts", "a") as file:
            file.write(json.dumps([os.environ.get(name) for name in READ_BY_CUDA]) + "\n")
        initialise()

    def build(recipe, stage, policy_dir, version, routed_experts):
        vllm._prepare_process(Settings("cuda", context=1, responses=1))
        return builtin.BuiltinEngine(policy_dir, version, "cuda:0")

    monkeypatch.setattr(torch._C, "_cuda_init", noting)
    monkeypatch.setattr(builtin, "build", build)
    live = ("schedule.kind=live", "schedule.sync_every=2", "schedule.max_lag=1", "run.rehearse=false")
    two_engines = ("rollout.workers=2", "rollout.groups_per_chunk=1", "schedule.updates_per_stage=2")
    megarl("train", recipe, "--run-dir", tmp_path / "run", *CUDA, *SHORT, *settings(*live, *two_engines))
    trainer, *engines = sorted(read_lines(tmp_path / "starts"))
    assert trainer == ["0", None, "expandable_segments:True"]
    assert engines == [["1", "1", None], ["2", "2", None]]  # vLLM's allocator has settings of its own


def test_the_commands_of_the_readme_work(recipe, tmp_path):
    from megarl.storage.run_dir import RunDir

    changed = '[actor]\nbackend = "cuda"\nkernels = "cuda"\ncheckpoint_every = 1\n'
    changed += "[schedule]\nstages = 1\nupdates_per_stage = 3\nprompts_per_update = 2\n"
    text = re.sub(r"\[(actor|schedule)\]\n[^\[]*", "", Path(recipe).read_text()) + changed
    (tmp_path / "recipe.toml").write_text(text)
    section = (ROOT / "README.md").read_text().partition("\n## Run on GPUs\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    done = []
    for name, *arguments in (shlex.split(line, comments=True) for line in block.splitlines()):
        assert name == "megarl"
        if arguments[0] == "train":
            kill_at(tmp_path / "runs/a/stages/000/checkpoints/update_000001", *arguments, folder=tmp_path)
        megarl(*arguments, folder=tmp_path)
        done.append(arguments[0])
    assert done == ["plan", "doctor", "train", "optimize", "report"]
    run, other = (RunDir.open(tmp_path / f"runs/{name}") for name in "ab")
    assert [line["update"] for line in metrics(run)] == [1, 2, 3] and run.final.exists()
    assert events(run, "resume"), "the run was not resumed"
    assert events(run, "evaluation") and events(run, "weight_drift") and not (run.root / "rehearsal").exists()
    assert [line["update"] for line in metrics(other)] == [1, 2, 3] and other.recipe.objective.name == "grpo"
    assert len({line["loss"] for line in metrics(run)}) == 3 and any(line["grad_norm"] > 0 for line in metrics(run))
    page = (tmp_path / "runs/compare.html").read_text()
    assert "<title>megarl: a, b</title>" in page
