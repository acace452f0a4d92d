"""The agents of several nodes, in threads of one process: nobody waits for one that is gone."""

import contextlib
import socket
import threading

import pytest

from megarl.distributed import ReplicaGroup
from megarl.workers.nodes import NodeRank, Nodes, Report, _open_store


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [(OSError("no room in /tmp"), "failed", "no room in /tmp"), (KeyboardInterrupt(), "stopped", "KeyboardInterrupt")],
)
def test_a_follower_that_leaves_says_why(error, outcome, cause):
    port = free_port()

    def follow():
        with contextlib.suppress(type(error)), Nodes(NodeRank(1, 2, "127.0.0.1", port)) as nodes:
            nodes.next_order()
            raise error

    follower = threading.Thread(target=follow)
    follower.start()
    with Nodes(NodeRank(0, 2, "127.0.0.1", port)) as nodes:
        number = nodes.order(phase="rollout")
        nodes.report(Report("done"))
        reports = nodes.reports(number)
        assert (reports[1].outcome, nodes.aborted()) == (outcome, True)
        assert "node 1" in reports[1].cause and cause in reports[1].cause
    follower.join()


def test_a_follower_that_left_without_a_word_failed():
    port = free_port()

    def follow():
        with Nodes(NodeRank(1, 2, "127.0.0.1", port)) as nodes:
            nodes.next_order()

    follower = threading.Thread(target=follow)
    follower.start()
    with Nodes(NodeRank(0, 2, "127.0.0.1", port)) as nodes:
        number = nodes.order(phase="rollout")
        nodes.report(Report("done"))
        report = nodes.reports(number)[1]
        assert report.outcome == "failed" and "node 1" in report.cause and "left" in report.cause
    follower.join()


def test_who_waits_for_peers_can_leave():
    class Left(Exception):
        pass

    asked = []

    def leave():
        asked.append(None)
        if len(asked) == 3:
            raise Left

    store, _ = _open_store(NodeRank())
    with pytest.raises(Left):
        ReplicaGroup(store, 0, 2, leave).barrier("generated")
