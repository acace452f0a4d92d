"""The agents of several nodes, as threads of one process: no agent waits for one that has ended or hangs."""

import contextlib
import json
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

# where an agent would end its process, it ends the thread
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def node(rank, run_dir):
    return Nodes(NodeRank(rank, 2, "127.0.0.1"), run_dir=run_dir)


@pytest.fixture(autouse=True)
def lost(monkeypatch):
    """The agents that have lost the first one, which ends their threads instead of this process."""
    found = queue.Queue()

    def lose_first(agent):
        found.put(agent.rank)
        raise SystemExit

    monkeypatch.setattr(Nodes, "_lose_first", lose_first)
    return found


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [(OSError("no room in /tmp"), "failed", "no room in /tmp"), (KeyboardInterrupt(), "stopped", "KeyboardInterrupt")],
)
def test_an_agent_that_fails_or_is_stopped_reports_the_cause(error, outcome, cause, tmp_path):

    def follow():
        with contextlib.suppress(type(error)), node(1, tmp_path) as agents:
            agents.meet()
            raise error

    follower = threading.Thread(target=follow)
    follower.start()
    with node(0, tmp_path) as agents:
        agents.begin()
        while not agents.aborted():
            time.sleep(0.01)
        agents.report(Report("done"))
        report = agents.reports()[1]
        assert report.outcome == outcome
        assert "node 1" in report.cause and cause in report.cause
    follower.join()


def test_the_end_of_the_first_agent_aborts_what_it_has_begun_and_ends_the_others(tmp_path, lost):
    seen = []

    def follow():
        with node(1, tmp_path) as agents:
            assert agents.meet() is not None
            while not agents.aborted():
                time.sleep(0.01)
            agents.report(Report("aborted"))
            seen.append(agents.meet())

    follower = threading.Thread(target=follow)
    follower.start()
    with contextlib.suppress(OSError), node(0, tmp_path) as agents:
        agents.begin()
        raise OSError("no space left on device")
    follower.join()
    assert seen == [None] and lost.empty()


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


@pytest.fixture(params=["another start's store", "somebody who says nothing", "nobody"])
def old_address(request):
    """(port, id) of a leader.json that an earlier start left."""
    if request.param == "another start's store":
        store = nodes._serve(0)
        store.set("id", "1f")
        yield store.port, "2e"
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if request.param == "nobody":
                listener.close()
            yield listener.getsockname()[1] if request.param != "nobody" else 1, "1f"


def test_a_follower_ignores_an_address_that_an_earlier_start_left(tmp_path, monkeypatch, old_address):
    monkeypatch.setattr(nodes, "CONNECT_SECONDS", 1.0)
    port, identity = old_address
    (tmp_path / "leader.json").write_text(json.dumps({"address": "127.0.0.1", "port": port, "id": identity}))
    joined, tried, connect = [], threading.Event(), nodes._connect

    def connected(**place):
        try:
            return connect(**place)
        finally:
            tried.set()

    monkeypatch.setattr(nodes, "_connect", connected)

    def follow():
        with node(1, tmp_path) as agents:
            joined.append(agents.meet())

    follower = threading.Thread(target=follow)
    follower.start()
    assert tried.wait(60)
    with node(0, tmp_path) as agents:
        agents.begin()
        follower.join()
    assert joined == [0]


def test_the_processes_of_two_nodes_share_a_store_in_each_attempt(tmp_path, monkeypatch):
    """Another one in the next attempt, which must not see what torch wrote when this one failed."""
    places = []

    def follow():
        with node(1, tmp_path) as agents:
            while agents.meet() is not None:
                places.append(agents.phase_store)
                agents.report(Report("done"))

    follower = threading.Thread(target=follow)
    follower.start()
    with node(0, tmp_path) as agents:
        for attempt in range(2):
            agents.begin()
            monkeypatch.setenv("MEGARL_STORE", agents.phase_store)
            store = distributed._phase_store()
            assert not store.check(["failure"])
            store.set("failure", "an error of NCCL")
            agents.report(Report("done"))
            assert agents.reports() == {0: Report("done"), 1: Report("done")}
            assert places[attempt] == agents.phase_store
    follower.join()


def test_a_file_with_a_colon_in_its_path_is_no_address(tmp_path, monkeypatch):
    (tmp_path / "a:1").mkdir()
    monkeypatch.setenv("MEGARL_STORE", str(tmp_path / "a:1/store"))
    distributed._phase_store().set("key", "value")
    assert (tmp_path / "a:1/store").exists()


def test_ports_that_are_chosen_serve_every_attempt_and_a_taken_one_is_named():
    port = nodes._serve(0).port
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


def test_a_follower_without_a_leader_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.0)
    with pytest.raises(PhaseFailed, match="cannot reach node 0 at the address in .*leader.json.*all nodes share"):
        node(1, tmp_path)


def follow_until(event, run_dir):
    """An agent that joins the first one, meets it, and then hangs like in a call to a file system."""

    def follow():
        with contextlib.suppress(SystemExit), node(1, run_dir) as agents:
            agents.meet()
            event.wait(60)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    return follower


def test_a_store_that_does_not_answer_is_noticed(tmp_path, monkeypatch, lost):
    monkeypatch.setattr(nodes, "LEADER_LOST_SECONDS", 0.3)
    answers, exchange = threading.Event(), Nodes._exchange
    monkeypatch.setattr(Nodes, "_exchange", lambda agent: (agent.rank and answers.wait(60), exchange(agent)))
    follower = follow_until(answers, tmp_path)
    with node(0, tmp_path):
        assert lost.get(timeout=60) == 1
        answers.set()
    follower.join(60)


def test_an_agent_whose_main_thread_hangs_counts_as_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "HANGS_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "DEAD_AFTER_SECONDS", 2.0)
    told = threading.Event()
    follower = follow_until(told, tmp_path)
    with node(0, tmp_path) as agents:
        agents.begin()
        agents.report(Report("done"))
        report = agents.reports()[1]
        assert report.outcome == "failed" and "node 1" in report.cause and "hangs" in report.cause
        assert agents.aborted()
        told.set()
    follower.join(60)


def test_a_first_agent_whose_main_thread_hangs_is_noticed_though_its_store_answers(tmp_path, monkeypatch, capfd, lost):
    monkeypatch.setattr(nodes, "HANGS_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "DEAD_AFTER_SECONDS", 2.0)
    noticed = threading.Event()
    follower = follow_until(noticed, tmp_path)
    with node(0, tmp_path) as agents:
        agents.begin()
        assert lost.get(timeout=60) == 1  # like a call to a file system that does not respond
        noticed.set()
    follower.join(60)
    assert_stack_was_printed(capfd)


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
    agent = SimpleNamespace(rank=0, _beats=0, _silent=0, _closing=SimpleNamespace(wait=lambda seconds: next(steps)))
    Nodes._check(agent, 0)
    assert printed == [nodes.HANGS_SECONDS]
