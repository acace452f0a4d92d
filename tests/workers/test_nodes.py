"""The agents of several nodes, as threads of one process: no agent waits for one that has ended or hangs."""

import contextlib
import queue
import re
import socket
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from megarl import distributed
from megarl.distributed import ReplicaGroup
from megarl.errors import PhaseFailed
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from megarl.workers import launcher, nodes
from megarl.workers.nodes import NodeRank, Nodes, Report
from tests.helpers import two_free_ports


@pytest.fixture
def node():
    """A function: rank -> the agent of that node, one of two."""
    port = two_free_ports()
    return lambda rank: Nodes(NodeRank(rank, 2, "127.0.0.1", port))


@pytest.fixture
def following():
    """A function that calls another one in a thread, whose end the test waits for."""
    threads = []

    def start(function):
        threads.append(threading.Thread(target=function, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [(OSError("no room in /tmp"), "failed", "no room in /tmp"), (KeyboardInterrupt(), "stopped", "KeyboardInterrupt")],
)
@pytest.mark.parametrize("between", [False, True])
def test_an_agent_that_fails_or_is_stopped_reports_the_cause(error, outcome, cause, between, node, following):
    def follow():
        with contextlib.suppress(type(error)), node(1) as agents:
            if not between:  # attempts: then it ends the next one
                agents.meet()
            raise error

    following(follow)
    with node(0) as agents:
        agents.begin()
        wait_until(agents.aborted)
        agents.report(Report("done"))
        report = agents.reports()[1]
        assert report.outcome == outcome
        assert "node 1" in report.cause and cause in report.cause


def test_the_end_of_the_first_agent_aborts_what_it_has_begun_and_ends_the_others(node, following):
    seen, met = [], threading.Event()

    def follow():
        with node(1) as agents:
            assert agents.meet() is not None
            met.set()
            wait_until(agents.aborted)
            agents.report(Report("aborted"))
            seen.append(agents.meet())

    follower = following(follow)
    with contextlib.suppress(OSError), node(0) as agents:
        agents.begin()
        met.wait(60)
        raise OSError("no space left on device")
    follower.join()
    assert seen == [None]


def test_other_agents_find_in_the_events_what_was_begun_last(recipe, tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    monkeypatch.setattr(launcher, "APPEAR_SECONDS", 0)
    nodes = SimpleNamespace(name=lambda: "node 1", meet=iter([9, None]).__next__, report=(reports := []).append)
    launcher.follow(nodes, run.root)  # the events of another file system, which has none
    assert reports[0].mistake and "all nodes share" in reports[0].cause
    run.stage(0).log_event("phase_start", phase="rollout", nodes=2, processes=3)
    run.stage(0).log_event("restart", phase="rollout", attempt=1, cause="killed")
    run.stage(1).log_event("phase_start", phase="optimize", nodes=2, processes=4)
    assert launcher._begun(run) == (run.stage(1), "optimize", 4, run.logs / "001_optimize/attempt_0")
    for attempt in (1, 2):
        run.stage(1).log_event("no_progress", phase="optimize", cause="stopped")
        run.stage(1).log_event("restart", phase="optimize", attempt=attempt, cause="stopped")
    assert launcher._begun(run) == (run.stage(1), "optimize", 4, run.logs / "001_optimize/attempt_2")


def test_an_agent_waits_until_it_sees_what_the_first_one_wrote(recipe, tmp_path, monkeypatch):
    """On some shared file systems it becomes visible late; the events would name the attempt before."""
    run, seen = RunDir.create(tmp_path / "run", load_recipe(recipe)), []
    events = run.root / "events.jsonl"
    run.stage(0).log_event("phase_start", phase="rollout", nodes=2, processes=1)
    before = events.read_bytes()
    run.stage(0).log_event("restart", phase="rollout", attempt=1, cause="killed")
    after = events.read_bytes()
    events.write_bytes(before)
    monkeypatch.setattr(launcher.time, "sleep", lambda _: events.write_bytes(after))
    monkeypatch.setattr(launcher, "_run_here", lambda *where: seen.append(where[-1].name))
    nodes = SimpleNamespace(meet=iter([len(after), None]).__next__, report=lambda _: None)
    launcher.follow(nodes, run.root)
    assert seen == ["attempt_1"]


def test_a_replica_that_waits_for_others_can_be_interrupted():
    class Left(Exception):
        pass

    asked = []

    def leave():
        asked.append(None)
        if len(asked) == 3:
            raise Left

    with pytest.raises(Left):
        ReplicaGroup(dist.HashStore(), 0, 2, leave).barrier("generated")


def test_two_agents_of_one_node_are_refused(node, following):
    """The other one is of an earlier start, or of another run with the same port."""
    told = threading.Event()

    def follow():
        with node(1):
            told.wait(60)

    following(follow)
    with node(0):
        with pytest.raises(PhaseFailed, match="another agent of node 1 has joined"):
            node(1)
        told.set()


def test_the_processes_of_two_nodes_share_a_store_in_each_attempt(node, following, monkeypatch):
    """Another one in the next attempt, which must not see what torch wrote when this one failed."""
    places = []

    def follow():
        with node(1) as agents:
            while agents.meet() is not None:
                places.append(agents.phase_store)
                agents.report(Report("done"))

    following(follow)
    with node(0) as agents:
        for attempt in range(2):
            agents.begin()
            distributed._open_store.cache_clear()
            monkeypatch.setenv("MEGARL_STORE", agents.phase_store)
            store = distributed._phase_store()
            assert not store.check(["failure"])
            store.set("failure", "an error of NCCL")
            agents.report(Report("done"))
            assert agents.reports() == {0: Report("done"), 1: Report("done")}
            assert places[attempt] == agents.phase_store


def test_an_attempt_begins_only_once_its_store_listens(node, following, monkeypatch):
    """Else a process that looks for the store meets that of the attempt before, or nobody."""
    told, serve = [], nodes._serve

    def follow():
        with node(1) as agents:
            while agents.meet() is not None:
                agents.report(Report("done"))

    following(follow)
    with node(0) as agents:
        monkeypatch.setattr(nodes, "_serve", lambda port: (told.append(agents._says.attempt), serve(port))[1])
        for _ in range(2):
            agents.begin()
            agents.report(Report("done"))
            agents.reports()
    assert told == [0, 1]


def test_a_file_with_a_colon_in_its_path_is_no_address(tmp_path, monkeypatch):
    (tmp_path / "a:1").mkdir()
    monkeypatch.setenv("MEGARL_STORE", str(tmp_path / "a:1/store"))
    distributed._phase_store().set("key", "value")
    assert (tmp_path / "a:1/store").exists()


def test_a_port_serves_every_attempt_and_a_taken_one_is_named():
    port = two_free_ports()
    for _ in range(3):
        store = nodes._serve(port)
        store.set("key", "value")
        del store
    with socket.create_server(("", port)), pytest.raises(PhaseFailed, match=f"port {port} .*MASTER_PORT"):
        nodes._serve(port)


def test_the_only_node_of_a_run_listens_nowhere():
    before = {connection.laddr for connection in psutil.Process().net_connections() if connection.status == "LISTEN"}
    with Nodes(NodeRank()) as agents:
        agents.begin()
        agents.report(Report("done"))
        assert agents.reports() == {0: Report("done")} and agents.phase_store == ""
        now = {connection.laddr for connection in psutil.Process().net_connections() if connection.status == "LISTEN"}
    assert now <= before


def test_a_follower_without_a_leader_says_where_it_looked(node, monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 1.0)
    with pytest.raises(PhaseFailed, match=r"cannot reach node 0 at 127.0.0.1:\d+: .*MASTER_ADDR"):
        node(1)


@pytest.mark.parametrize("silent", ["the store", "the first agent"])
def test_an_agent_that_loses_the_first_one_never_waits_for_it(silent, node, following, monkeypatch):
    """Whatever the store does, the main thread sees its processes and signals, and ends the attempt by itself."""
    monkeypatch.setattr(nodes, "LEADER_LOST_SECONDS", 2.0)
    monkeypatch.setattr(nodes, "HANGS_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "DEAD_AFTER_SECONDS", 2.0 if silent == "the first agent" else 1e6)
    answers, parse, ended = threading.Event(), nodes.Said.parse, []
    cut = threading.Event()

    def get(text):
        if cut.is_set() and silent == "the store" and threading.current_thread() is agents[1]._exchanging:
            answers.wait(60)
        return parse(text)

    monkeypatch.setattr(nodes.Said, "parse", get)
    agents = {}

    def follow():
        with contextlib.suppress(PhaseFailed), node(1) as agents[1]:
            agents[1].meet()
            cut.set()
            asked = 0  # how often it could, while the store had been silent for a second
            while not agents[1].aborted():
                asked += agents[1]._silent * nodes.HEARTBEAT_SECONDS > 1
                time.sleep(0.01)
            agents[1].report(Report("aborted"))
            ended.append(asked)
            with pytest.raises(PhaseFailed, match=r"node 1 .*lost the agent of node 0"):
                agents[1].meet()
            ended.append("left")

    follower = following(follow)
    with node(0) as agents[0]:
        agents[0].begin()
        if silent == "the store":
            agents[0].report(Report("done"))
            wait_until(lambda: ended)
        else:
            follower.join()  # like a call to a file system that does not respond
        follower.join()
        answers.set()
    assert (ended[0] > 0) == (silent == "the store") and ended[1:] == ["left"]


def test_an_agent_that_lost_the_first_one_and_hangs_is_ended(node, following, monkeypatch):
    monkeypatch.setattr(nodes, "LEADER_LOST_SECONDS", 0.3)
    monkeypatch.setattr(nodes, "DEAD_AFTER_SECONDS", 1.0)
    said, told = queue.Queue(), threading.Event()
    monkeypatch.setattr(nodes, "_end_at_once", said.put)

    def follow():
        with contextlib.suppress(PhaseFailed), node(1) as agents:
            agents._lose_first()
            told.wait(60)

    following(follow)
    with node(0):
        assert "lost the agent of node 0" in said.get(timeout=60)
        told.set()


def test_an_agent_whose_main_thread_hangs_counts_as_dead(node, following, monkeypatch):
    monkeypatch.setattr(nodes, "HANGS_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "DEAD_AFTER_SECONDS", 2.0)
    told = threading.Event()

    def follow():
        with node(1) as agents:
            agents.meet()
            told.wait(60)

    following(follow)
    with node(0) as agents:
        agents.begin()
        agents.report(Report("done"))
        report = agents.reports()[1]
        assert report.outcome == "failed" and "node 1" in report.cause and "hangs" in report.cause
        assert agents.aborted()
        told.set()


def test_the_agent_of_a_single_node_prints_its_stack_when_it_hangs(monkeypatch, capfd):
    monkeypatch.setattr(nodes, "HANGS_SECONDS", 1.5)
    printed, print_stacks = threading.Event(), nodes._print_stacks
    monkeypatch.setattr(nodes, "_print_stacks", lambda idle: (print_stacks(idle), printed.set()))
    with Nodes(NodeRank(0, 1, "127.0.0.1")):
        assert printed.wait(60)
        assert_stack_was_printed(capfd)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert "no progress" not in capfd.readouterr().err


def assert_stack_was_printed(capfd):
    said = capfd.readouterr().err
    assert "megarl: no progress for" in said and "file system" in said
    assert re.search(r'test_nodes.py", line \d+ in test_', said), said


def test_a_suspended_agent_does_not_count_as_hanging(monkeypatch):
    """While the process is suspended no check takes place, however much time passes."""
    printed, steps = [], iter([False, False, *[False] * int(nodes.HANGS_SECONDS / nodes.HEARTBEAT_SECONDS), True])
    monkeypatch.setattr(nodes, "_print_stacks", printed.append)
    monkeypatch.setattr(nodes, "time", SimpleNamespace(clock_gettime=lambda clock: 1.0))
    agent = SimpleNamespace(
        rank=0, dead={}, _heard={}, _beats=0, _silent=0, _closing=SimpleNamespace(wait=lambda seconds: next(steps))
    )
    Nodes._check(agent, 0)
    assert printed == [nodes.HANGS_SECONDS]
