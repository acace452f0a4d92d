"""Stalled processes are found within their limit: SIGSTOP to each kind of process."""

import json
import time
from types import SimpleNamespace

import pytest

from megarl.storage.run_dir import RunDir
from megarl.workers.watch import Watch, Watched
from tests.extent import few
from tests.helpers import events, fork_server_of, metrics, processes_of, wait_until_nobody_works_on
from tests.phases.commands import settings, start_held

pytestmark = pytest.mark.crash

SECONDS = 20
SMALL = ("schedule.stages=1", "schedule.updates_per_stage=12", "schedule.prompts_per_update=2", "eval.every=0")
LIVE = ("schedule.kind=live", "schedule.sync_every=2", "schedule.max_lag=4")
EVALUATES = ("eval.every=1", "eval.prompts=128", "eval.samples=8")


@pytest.fixture
def start(recipe, tmp_path):
    """A function that starts a run, in tmp_path / "run", and returns it with the process that is held."""
    run, marker = tmp_path / "run", tmp_path / "held"
    small = settings(*SMALL, f"run.stall_seconds={SECONDS}")
    return lambda operation, count, *more: start_held(
        marker, operation, count, "train", recipe, "--run-dir", run, *small, *more
    )


def of_rank(name):
    """A function: process id of `megarl` -> process of a rank, found by its name in ``ps``."""
    return lambda parent: next(p for p in processes_of(parent, name.partition(":")[0]) if p.name() == name)


def supervisor(parent):
    """The process that manages the verifiers, a child of the rollout worker."""
    return next(p for p in of_rank("rollout:0")(parent).children() if p.name() == "verifier")


# file operations at which a process is held until the test has stopped one; this must not itself take so long that it
# counts as a stall
TRAINS, STORES = "open .*/metrics.jsonl", r"replace .*/rollouts/.*\.arrow"
EVALUATED = r"replace .*/evaluations/.*\.arrow"

# case: (finds the process to stop, what is held and how often before, settings, phase, place that the message names)
CASES = {
    "trainer": (of_rank("optimize:0"), (TRAINS, 2), (), "optimize", "update"),  # also matches the checkpoint
    "generator": (of_rank("rollout:0"), (STORES, 2), (), "rollout", "chunk "),
    "supervisor of verifiers": (supervisor, (STORES, 2), (), "rollout", "chunk "),
    "evaluating": (of_rank("evaluate:0"), (EVALUATED, 1), (*LIVE, *EVALUATES), "evaluate", ""),
    "live trainer": (of_rank("live:0"), (TRAINS, 2), LIVE, "live", ""),
    "live generator": (of_rank("live:1"), (STORES, 2), LIVE, "live", ""),
    "fork server": (fork_server_of, (TRAINS, 2), (), "optimize", ""),
}


@pytest.mark.parametrize("case", few(CASES, "live generator", "fork server"))
def test_a_stopped_process_ends_the_phase_and_is_named(case, start, tmp_path):
    find, operation, others, phase, place = CASES[case]
    run = tmp_path / "run"
    command, _ = start(*operation, *settings(*others))
    victim = find(command.pid)
    name = victim.name()
    victim.suspend()
    (tmp_path / "held").write_text("")
    assert command.wait() == 1, command.stderr
    message = command.stderr[command.stderr.rindex("megarl: ") :]
    first = message.splitlines()[0]
    assert f"{phase} of stage 0: no progress for" in first and f"process {victim.pid} ({name})" in first, message
    assert "is stopped" in first and place in first, message
    (event,) = events(RunDir.open(run), "no_progress")
    assert event["phase"] == phase and event["cause"] in first
    assert event["cause"] in command.stdout  # the progress display
    log = run / f"logs/000_{phase}/attempt_0/rank_000{int(case == 'live generator')}.log"
    assert str(log) in message
    if case != "fork server":  # the ranks that it had forked were not stopped and have ended
        assert "most recent call first" in log.read_text()
    wait_until_nobody_works_on(run)


def test_a_phase_with_a_stopped_trainer_is_restarted(start, tmp_path):
    command, trainer = start(TRAINS, 4, *settings("run.max_restarts=1"))
    trainer.suspend()
    (tmp_path / "held").write_text("")
    assert command.wait() == 0, command.stderr
    run = RunDir.open(tmp_path / "run")
    (restart,) = events(run, "restart")
    assert "no progress for" in restart["cause"] and f"process {trainer.pid} (optimize:0)" in restart["cause"]
    assert [update["update"] for update in metrics(run)] == list(range(1, 13))


class Clock:
    """A `Watch` over two ranks with heartbeat files, on a simulated clock."""

    def __init__(self, monkeypatch, folder, seconds=10.0, alone=True):
        self.now = 0.0
        monkeypatch.setattr("megarl.workers.watch.time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))
        self.files = [folder / f"beats_{rank}" for rank in (0, 1)]
        too_large = 2**22 + 1  # for the id of a process
        watched = [Watched(rank, too_large + rank, file, folder / "log") for rank, file in enumerate(self.files)]
        self.watch = Watch(watched, seconds, alone, print)

    def beat(self, rank, number, kind="update", where="update 7"):
        self.files[rank].write_text(json.dumps({"number": number, "kind": kind, "where": where}))

    def after(self, seconds, ended=()):
        """The stall found within the next ``seconds``, with two checks per second, or None."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            if found := self.watch.check(ended):
                return found
        return None


def test_suspended_time_does_not_count(monkeypatch, tmp_path):
    clock = Clock(monkeypatch, tmp_path)
    for number in (1, 2):
        clock.beat(0, number)
        clock.beat(1, number)
        assert clock.after(0.5) is None
    clock.now += 1e6  # as if the whole job, including the watch, had been suspended
    assert clock.after(8) is None
    assert clock.after(3, ended=[0, 1]) is None
    assert clock.after(3) is not None


@pytest.mark.parametrize("alone", [True, False])
def test_a_stall_is_found_if_all_ranks_of_the_only_node_wait(alone, monkeypatch, tmp_path):
    clock = Clock(monkeypatch, tmp_path, alone=alone)
    found = None
    for number in range(1, 200):
        for rank in (0, 1):
            clock.beat(rank, number, "wait", "a wait for others")
        found = found or clock.after(0.5)
    assert bool(found) == alone  # with several nodes, ranks of the others may be at work
