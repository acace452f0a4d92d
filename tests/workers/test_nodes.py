"""The agents of several nodes, as threads of one process: no agent waits for one that has ended or hangs."""

import contextlib
import json
import queue
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megarl import distributed
from megarl.distributed import ReplicaGroup
from megarl.errors import PhaseFailed, UserError
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from megarl.workers import launcher, nodes
from megarl.workers.nodes import NodeRank, Nodes, Report
from megarl.workers.processes import STOPPED
from tests.helpers import free_ports

# where an agent would end its process, it ends the thread
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def node(tmp_path):
    """A function: rank -> the agent of one of two nodes, with the port of their store."""

    def start(rank, run_dir=tmp_path):
        return Nodes(NodeRank(rank, 2, "127.0.0.1", start.port), run_dir=run_dir)

    start.port = free_ports(2)[0]
    return start


@pytest.fixture(autouse=True)
def lost(monkeypatch):
    """The agents that end at once, such as those that lose the first one: only their threads end."""
    found = queue.Queue()

    def end(agent, message):
        found.put(agent.rank)
        raise SystemExit

    monkeypatch.setattr(Nodes, "_end", end)
    return found


@contextlib.contextmanager
def two(node, follow):
    """The agent of the first node, while ``follow`` has that of the second in a thread."""

    def work():
        with contextlib.suppress(OSError, KeyboardInterrupt), node(1) as agents:
            follow(agents)

    follower = threading.Thread(target=work)
    follower.start()
    try:
        with node(0) as agents:
            yield agents
    finally:
        follower.join()


def wait_until_aborted(agents):
    while not (reason := agents.aborted()):
        time.sleep(0.01)
    return reason


@pytest.mark.parametrize(
    ("error", "outcome"), [(OSError("no room in /tmp"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_an_agent_that_fails_or_is_stopped_reports_the_cause(error, outcome, node):
    def follow(agents):
        agents.meet()
        raise error

    with two(node, follow) as agents:
        agents.begin({})
        assert wait_until_aborted(agents) == (STOPPED if outcome == "stopped" else "1")
        agents.report(Report("done"))
        report = agents.reports()[1]
        assert report.outcome == outcome and "node 1" in report.cause and repr(error) in report.cause


def test_the_end_of_the_first_agent_aborts_what_it_has_begun_and_ends_the_others(node, lost):
    seen = []

    def follow(agents):
        assert agents.meet() is not None
        wait_until_aborted(agents)
        agents.report(Report("aborted"))
        seen.append(agents.meet())
        with pytest.raises(PhaseFailed, match="the run failed: see the output of node 0"):
            agents.check_end()
        seen.append("raised")

    with contextlib.suppress(OSError), two(node, follow) as agents:
        agents.begin({})
        raise OSError("no space left on device")
    assert seen == [None, "raised"] and lost.empty()


def test_a_mistake_of_the_user_is_the_cause_whatever_clocks_say():
    reports = {0: Report("failed", "connection closed", time=1.0), 1: Report("failed", "wrong", mistake=True, time=2.0)}
    assert launcher._first_failure(reports).cause == "wrong"


def test_other_agents_make_the_attempts_that_the_first_one_begins(recipe, tmp_path, monkeypatch):
    """What it wrote may become visible late on a shared file system, and never on one that is not shared."""
    run, seen, reports = RunDir.create(tmp_path / "run", load_recipe(recipe)), [], []
    run.stage(1).log_event("phase_start", phase="optimize", nodes=2, processes=4)
    after = run.events.read_bytes()
    run.events.unlink()
    monkeypatch.setattr(launcher.time, "sleep", lambda _: run.events.write_bytes(after))
    monkeypatch.setattr(launcher, "_run_here", lambda nodes, *attempt: seen.append(attempt))
    begun = {"stage": 1, "phase": "optimize", "processes": 4, "events": len(after)}

    def follow(attempts):
        met = iter([*attempts, None])
        calls = dict(meet=met.__next__, report=reports.append, name=lambda: "node 1", check_end=lambda: None)
        launcher.follow(SimpleNamespace(**calls), run.root)

    follow([begun | {"attempt": attempt} for attempt in (0, 1)])
    logs = [run.logs / f"001_optimize/attempt_{attempt}" for attempt in (0, 1)]
    assert seen == [(run.stage(1), "optimize", 4, folder) for folder in logs]
    monkeypatch.setattr(launcher, "APPEAR_SECONDS", 0)
    follow([begun | {"attempt": 0, "events": len(after) + 1}])
    last = reports[-1]
    assert len(seen) == 2 and last.mistake and "lacks what node 0 wrote" in last.cause and "nodes share" in last.cause


def test_a_replica_that_waits_for_others_can_be_interrupted():
    with pytest.raises(StopIteration):
        ReplicaGroup(dist.HashStore(), 0, 2, iter(range(3)).__next__).barrier("generated")


def test_the_first_replica_that_asks_computes_what_all_get():
    def lost():
        raise AssertionError("nobody has computed it")

    replicas = [ReplicaGroup(dist.HashStore(), 0, 2, lost)] * 2
    assert [replica.once("x", lambda number=number: number) for number, replica in enumerate(replicas)] == [0, 0]


def test_an_agent_waits_for_the_start_after_one_that_is_ending(node, tmp_path, monkeypatch):
    """At the same port: its store says that the first agent has left, and then it ends."""
    met, asked, check = [], threading.Event(), dist.PrefixStore.check
    monkeypatch.setattr(dist.PrefixStore, "check", lambda *of: asked.set() or check(*of))
    ending = nodes._serve(node.port)
    (tmp_path / nodes.WORD).write_text("before")
    ending.set(nodes.WORD, "before")
    dist.PrefixStore("before", ending).set("0", json.dumps({"attempt": 1, "report": None, "left": True}))

    def follow():
        with node(1) as agents:
            met.append(agents.meet())

    follower = threading.Thread(target=follow)
    follower.start()
    assert asked.wait(60)
    del ending
    with node(0) as agents:
        agents.begin({"stage": 3})
        agents.report(Report("done"))
        follower.join()
    assert met == [{"stage": 3}]


def test_a_second_agent_of_a_node_is_refused(node, monkeypatch):
    with two(node, lambda agents: agents.meet()) as agents:
        monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.5)
        with pytest.raises(PhaseFailed, match=r"node 0 of 2 did not join .* a rank of their own"):
            node(1)
        agents.begin({})
        agents.report(Report("done"))


def test_a_cause_is_cut_to_what_the_store_takes(node):
    def follow(agents):
        agents.meet()
        agents.report(Report("failed", "first line\n" + 2**23 * "x" + "\nlast line"))
        agents.meet()

    with two(node, follow) as agents:
        agents.begin({})
        agents.report(Report("done"))
        cause = agents.reports()[1].cause
    assert len(cause) < 20_010 and cause.startswith("first line\n") and cause.endswith("\nlast line")


def test_an_agent_whose_exchange_fails_ends(node, lost):
    """Otherwise the run would wait for ever."""
    follower = threading.Thread(target=lambda: node(1).__exit__(None, None, None))
    follower.start()
    first = node(0)
    first._say(report=object())
    assert lost.get(timeout=60) == 0
    follower.join()


def test_agents_with_another_run_directory_are_refused(tmp_path, node, monkeypatch):
    """Even if it has the same name, as on nodes that share no file system."""
    monkeypatch.setattr(nodes, "APPEAR_SECONDS", 0.5)

    def lead():
        with pytest.raises(PhaseFailed, match="node 1 of 2 did not join at"):
            node(0, tmp_path / "0/run")

    first = threading.Thread(target=lead)
    first.start()
    (tmp_path / "1/run").mkdir(parents=True)
    (tmp_path / "1/run" / nodes.WORD).write_text("of an earlier start")
    with pytest.raises(UserError, match="must lie on a file system that all nodes share"):
        node(1, tmp_path / "1/run")
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.0)
    first.join()


def test_the_processes_of_two_nodes_share_a_store_in_each_attempt(node, monkeypatch):
    """Another one in the next attempt, which must not see what torch wrote when this one failed."""
    places = []

    def follow(agents):
        while agents.meet() is not None:
            places.append(agents.phase_store)
            agents.report(Report("done"))

    with two(node, follow) as agents:
        for attempt in range(2):
            agents.begin({})
            monkeypatch.setenv("MEGARL_STORE", agents.phase_store)
            distributed._open_store.cache_clear()  # in a run each attempt has processes of its own
            store = distributed._phase_store()
            assert not store.check(["failure"])
            store.set("failure", "an error of NCCL")
            agents.report(Report("done"))
            assert agents.reports() == {0: Report("done"), 1: Report("done")}
            assert places[attempt] == agents.phase_store


def test_a_file_with_a_colon_in_its_path_is_no_address(tmp_path, monkeypatch):
    (tmp_path / "a:1").mkdir()
    monkeypatch.setenv("MEGARL_STORE", str(tmp_path / "a:1/store"))
    distributed._phase_store().set("key", "value")
    assert (tmp_path / "a:1/store").exists()


def test_a_port_serves_every_attempt_and_a_taken_one_is_named():
    (port,) = free_ports(1)
    for _ in range(3):
        store = nodes._serve(port)
        store.set("key", "value")
        del store
    with socket.create_server(("", port)), pytest.raises(PhaseFailed, match=f"port {port} .*MASTER_PORT"):
        nodes._serve(port)


@pytest.mark.parametrize("silent", [False, True])
def test_a_follower_without_a_leader_says_where_it_looked(silent, tmp_path, monkeypatch):
    """silent: somebody else listens there and says nothing."""
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not silent:
            listener.close()
        with pytest.raises(PhaseFailed, match=f"node 0 of 2 did not join at 127.0.0.1:{port}"):
            Nodes(NodeRank(1, 2, "127.0.0.1", port), run_dir=tmp_path)


def test_a_store_that_does_not_answer_is_noticed(node, monkeypatch, lost):
    monkeypatch.setattr(nodes, "LEADER_LOST_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "DEAD_AFTER_SECONDS", 1.0)
    met, answers, get = threading.Event(), threading.Event(), dist.PrefixStore.get

    def follow(agents):
        agents.meet()
        monkeypatch.setattr(dist.PrefixStore, "get", lambda *of: answers.wait(60) and get(*of))
        met.set()
        agents.meet()  # waits for an attempt that never begins

    with two(node, follow) as agents:
        agents.begin({})
        assert met.wait(60)
        assert lost.get(timeout=60) == 1
        answers.set()
