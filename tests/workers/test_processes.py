"""How a node starts the processes of a phase, supervises them and ends them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from megarl.errors import UserError
from megarl.linux import state_of
from megarl.phases import preload
from megarl.phases.entry import become, report_end
from megarl.planner.preflight import check
from megarl.recipe.load import load_recipe, override_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir
from megarl.workers import launcher, processes
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import NodeRank, Nodes
from megarl.workers.processes import stop_signals_noted
from megarl.workers.watch import Stall, Watch, Watched
from tests.helpers import ROOT, fork_server_of
from tests.zygote import new_fork_server

SCRIPTS = {
    "done": "pass",
    "fails": "import sys; sys.exit(1)",
    "waits": "import signal as s, sys; s.signal(s.SIGTERM, lambda *_: sys.exit(143)); print('ready'); s.pause()",
    "ignores": "import signal as s; [s.signal(n, s.SIG_IGN) for n in (10, 15)]; print('ready')\nwhile 1: s.pause()",
    # these two have a child in a process group of its own, like an engine's server, which takes a moment to end
    "leaves": "import subprocess as s; print(s.Popen(['sleep', '1'], process_group=0).pid); raise SystemExit(1)",
    "stands": "import subprocess as s; print(s.Popen(['sleep', '1'], process_group=0).pid); s.run(['sleep', '60'])",
}


class Scripts:
    """`processes.Processes` that run the `SCRIPTS` with these names; signal handlers are in place from the start."""

    def __init__(self, *names):
        self.started = [
            subprocess.Popen([sys.executable, "-u", "-c", SCRIPTS[n]], stdout=subprocess.PIPE, start_new_session=True)
            for n in names
        ]
        self.pids = [process.pid for process in self.started]
        for name, process in zip(names, self.started, strict=True):
            if name in ("waits", "ignores"):
                process.stdout.readline()

    def poll(self, seconds):
        time.sleep(seconds)
        return {i: p.returncode for i, p in enumerate(self.started) if p.poll() is not None}

    def terminate(self):
        for process in self.started:
            process.terminate()

    def kill(self):
        for process in self.started:
            process.kill()


NO_STALL = SimpleNamespace(check=lambda _: None)


def supervise(scripts, signals=(), watch=NO_STALL, aborted=lambda: ""):
    return processes.supervise(scripts, signals, watch, aborted)


@pytest.mark.parametrize(
    ("scripts", "codes"),
    [
        (("done", "done"), (0, 0)),
        (("waits", "fails", "waits"), (143, 1, 143)),  # the others are asked to stop
        (("ignores", "fails"), (-signal.SIGKILL, 1)),  # and killed after the shutdown time
    ],
)
def test_when_one_process_fails_the_others_end_too(scripts, codes, monkeypatch):
    monkeypatch.setenv("MEGARL_SHUTDOWN_SECONDS", "0.2" if "ignores" in scripts else "600")
    ended = supervise(Scripts(*scripts))
    failed = frozenset({1} if "fails" in scripts else ())
    assert (ended.codes, ended.first, ended.stopped) == (dict(enumerate(codes)), failed, False)


@pytest.mark.parametrize(("reason", "code"), [(processes.STOPPED, 143), ("1", -signal.SIGKILL)])
def test_processes_may_save_if_the_agents_of_other_nodes_were_told_to_stop(reason, code, monkeypatch):
    monkeypatch.setenv("MEGARL_SHUTDOWN_SECONDS", "600")
    assert supervise(Scripts("waits"), aborted=lambda: reason).codes == {0: code}


@pytest.mark.parametrize(("script", "code"), [("leaves", 1), ("stands", -signal.SIGKILL)])
def test_processes_that_an_ended_phase_left_are_waited_for(script, code):
    """Otherwise they could still hold the GPUs when the phase is started again."""
    scripts = Scripts(script)
    left = int(scripts.started[0].stdout.readline())
    stall = Stall("stalled", certain=True, time=0.0) if script == "stands" else None
    watch = SimpleNamespace(check=lambda _: stall, dump=lambda _: None)
    assert supervise(scripts, watch=watch).codes == {0: code}
    assert not processes._lives_in(left, scripts.pids)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_stall_that_another_node_notices_first_is_that_of_the_process_stopped_here(stopped, tmp_path, monkeypatch):
    """The ranks of the other node wait for it, and may come to their limit before it comes to its own."""
    monkeypatch.setattr("megarl.workers.watch.DUMP_SECONDS", 0.0)
    scripts = Scripts("ignores")
    process = psutil.Process(scripts.pids[0])
    name = process.name()
    while stopped and process.status() != psutil.STATUS_STOPPED:
        process.suspend()
    watch = Watch([Watched(5, process.pid, tmp_path / "beats", tmp_path / "log")], 1e6, False, print)
    ended = supervise(scripts, watch=watch, aborted=lambda: processes.STALLED)
    assert ended.codes == {0: -signal.SIGKILL} and (ended.stall is not None) == stopped
    if stopped:
        assert ended.stall.certain
        assert f"process {process.pid} ({name}) of rank 5 is stopped" in ended.stall.text.splitlines()[0]


def test_a_signal_to_the_agent_is_passed_on_once_and_a_second_interrupt_kills():
    scripts = Scripts("waits", "ignores")

    def signal_twice():
        os.kill(os.getpid(), signal.SIGINT)
        while scripts.started[0].poll() is None:  # until the first signal was passed on
            time.sleep(0.01)
        time.sleep(1.1)  # a second one within a second counts as the same Ctrl-C
        os.kill(os.getpid(), signal.SIGTERM)  # as from Slurm when the time limit is reached; it kills nothing
        assert scripts.started[1].poll() is None
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    with stop_signals_noted() as signals:
        thread = threading.Thread(target=signal_twice)
        thread.start()
        ended = supervise(scripts, signals)
        thread.join()  # a signal after this context would end pytest
    assert ended.stopped and ended.codes == {0: 143, 1: -signal.SIGKILL}
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def stage(recipe, tmp_path):
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.stage(0).policy)
    return run.stage(0)


@pytest.mark.parametrize(
    ("codes", "how", "outcome"),
    [
        ((0, 0), {}, "done"),
        ((0, 0), {"stopped": True}, "stopped"),  # even if the phase was just done
        ((1, 0), {"stopped": True}, "stopped"),
        ((-signal.SIGKILL, -signal.SIGTERM), {}, "failed"),
        ((-signal.SIGKILL, -signal.SIGTERM), {"aborted": True}, "aborted"),  # another node failed by it
    ],
)
def test_a_stop_signal_ends_the_run_and_the_kernels_kill_is_its_cause(stage, codes, how, outcome):
    report = report_of(stage, codes, **how)
    assert report.outcome == outcome
    assert ("ran out of memory" in report.cause and report.primary) == (outcome == "failed")


def report_of(stage, codes, **how):
    """The report on the two ranks of a node, whose logs and ends are in the run directory."""
    ended = processes.Ended(dict(enumerate(codes)), frozenset({0} if codes[0] else ()), **{"stopped": False, **how})
    agents = SimpleNamespace(rank=0, count=2, name=lambda: "node 0")
    return launcher.Here(agents, stage, "optimize", 2, stage.run.root, stage.run.root).report(ended)


@pytest.mark.parametrize(("lines", "full"), [(10, True), (1000, False)])
def test_a_full_disk_is_the_cause_only_if_the_end_of_the_log_says_so(stage, lines, full):
    """What a library makes of the error follows it at once; a long log may have the words for another reason."""
    (stage.run.root / "rank_0000.log").write_text("No space left on device\n" + "unexpected pos\n" * lines)
    report = report_of(stage, (1, 0))
    assert report.mistake == report.cause.startswith("no space left on a device; free now: ") == full


def test_a_stop_names_a_rank_that_may_not_have_saved_its_updates_and_why(stage, capfd):
    first, second = (stage.run.root / f"rank_000{rank}.end" for rank in (0, 1))
    report_end(partial(sys.exit, 143), first)
    quota = "quota exceeded"
    for code, said in ((143, None), (0, None), (quota, quota), (None, "it was killed; MEGARL_SHUTDOWN_")):
        if code is None:
            second.unlink()
        else:
            report_end(partial(sys.exit, code), second)
        assert report_of(stage, (143, 1), stopped=True).outcome == "stopped"
        told = capfd.readouterr().err
        assert f"rank 1 may not have saved its updates since the last checkpoint: {said}" in told if said else not told


@pytest.fixture
def server(monkeypatch):
    """A fork server for this test alone, as a fork of this process; returns it once it exists."""
    processes.kill_server()  # that of other tests
    while fork_server_of(os.getpid()) is not None:
        time.sleep(0.01)
    new_fork_server(monkeypatch.setattr)

    def find():
        while (found := fork_server_of(os.getpid())) is None:
            time.sleep(0.01)
        return found

    yield find
    processes.kill_server()


@pytest.mark.parametrize("how", ["broken", "stopped"])
def test_without_a_fork_server_a_phase_starts_in_new_interpreters(how, stage, monkeypatch, server, capfd):
    """One that does not answer is given up after ``run.stall_seconds``."""
    recipe = override_recipe(stage.run.recipe, ["run.stall_seconds=6"])
    if how == "broken":
        monkeypatch.setattr(preload, "order", lambda *_: "no JSON")
    with Nodes(NodeRank()) as nodes:
        if how == "stopped":
            nodes.starter.prepare(recipe)
            server().suspend()
        check(nodes.starter, recipe)
        with pytest.raises(UserError, match="torch sees 0"):
            check(nodes.starter, override_recipe(recipe, ["actor.backend=cuda"]))
        run_phase(nodes, stage, "evaluate", 1)
    assert stage.evaluation()["prompts"] == 16
    assert capfd.readouterr().err.count("the fork server failed, or did not answer for 6 s") == 1


def test_forks_and_new_interpreters_give_the_same_evaluation(stage, monkeypatch):
    """A new interpreter needs nothing of the fork server, nor of what its environment has of it."""
    with Nodes(NodeRank()) as nodes:
        run_phase(nodes, stage, "evaluate", 1)
        fork = stage.evaluation()
        stage.run.events.unlink()
    monkeypatch.setattr("megarl.rollout.builtin.NEW_INTERPRETER", True)
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with Nodes(NodeRank()) as nodes:
        run_phase(nodes, stage, "evaluate", 1)
    new = RunDir.open(stage.run.root).stage(stage.number).evaluation()  # a new RunDir reads the events again
    assert all(fork[name] == new[name] for name in fork.keys() - {"time", "seconds", "generate_seconds"})


def test_a_process_has_the_agents_environment_and_a_session_of_its_own(tmp_path, monkeypatch, recipe):
    """Signals to the run's process group then miss it and its engine, and what it leaves is found by its session."""
    starter = processes.Starter()
    starter.prepare(recipe := load_recipe(recipe))
    monkeypatch.setenv("SET_LATER", "yes")
    for context in (processes.FORK, processes.NEW):
        log = tmp_path / context.get_start_method()
        (process,) = processes._start(context, [(say, (str(log), dict(os.environ)))])
        process.join()
        assert process.exitcode == 7
        assert json.loads(log.read_text()) == [process.pid, "yes"]


def say(log, environment):
    become(log, environment)
    print(json.dumps([os.getsid(0), os.environ["SET_LATER"]]))
    sys.exit(7)


@pytest.mark.parametrize("reaped", [True, False])
def test_an_end_is_no_kill_because_the_fork_server_dies_before_it_is_heard(tmp_path, recipe, server, reaped):
    """Neither if the report arrives together with the end of the connection, nor if there was none."""
    starter, go = processes.Starter(), tmp_path / "go"
    ends = [tmp_path / name for name in "012"]
    calls = [(end_with, (str(go), code, ends[n])) for n, code in enumerate((0, 5, None))]
    started = processes.Processes(starter._fork(calls, load_recipe(recipe), trains=False), ends)
    if not reaped:
        server().suspend()
        while state_of(server().pid) != "T":
            time.sleep(0.01)
    go.touch()
    while any(state_of(pid) != ("" if reaped else "Z") for pid in started.pids[:2]):
        time.sleep(0.01)
    killed = server()
    processes.kill_server()
    killed.wait()
    codes = {}
    while len(codes) < 3:
        codes = started.poll(0.01)
    assert codes == {0: 0, 1: 5, 2: -signal.SIGKILL}


def end_with(go, code, end):
    while not os.path.exists(go) or code is None:
        time.sleep(0.01)
    sys.exit(report_end(lambda: sys.exit(code), end))


READY_TO_FORK = """
import json, os, sys
from pathlib import Path
from megarl.storage.run_dir import RunDir
from megarl.phases import preload
preload._import_all(RunDir.open(Path(sys.argv[1])).recipe, trains=True)
assert "megatron.core" in sys.modules
import torch
threads = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
print(json.dumps([torch.cuda.is_initialized(), sorted(threads)[:-1] if len(threads) > 1 else []]))
"""


def test_a_process_with_all_imports_can_be_forked(stage):
    """It has no CUDA context, and no other thread than that of Arrow's jemalloc, which is prepared for forks."""
    command = [sys.executable, "-W", "ignore", "-c", READY_TO_FORK, str(stage.run.root)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    initialized, threads = json.loads(result.stdout.splitlines()[-1])
    assert not initialized
    assert set(threads) <= {"jemalloc_bg_thd"}
