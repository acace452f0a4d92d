"""The node agents of a run: one process per node, which communicate through a key-value store on the first node.

The agent of the first node, the leader, publishes an order for each phase; it alone writes events. Every agent starts
the processes of the phase on its own node and reports how they ended. When an agent reports a failure, or its
heartbeats stop, all others kill their processes of the phase at once.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist

from megarl.errors import PhaseFailed
from megarl.keystore import StoreClient, StoreServer, new_secret
from megarl.workers.activity import Activity
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import Starter
from megarl.workers.rendezvous import join, make_secret, publish

HEARTBEAT_SECONDS = 0.5
DEAD_AFTER_SECONDS = 15.0  # without a heartbeat; less than Slurm's KillWait, so the cause is logged before a job dies
LEADER_LOST_SECONDS = 60.0  # timeout of a request to the leader's store: more than a busy machine or file system needs
JOIN_TIMEOUT = timedelta(minutes=10)  # nodes of one job start seconds apart, but may have to pull a container first
POLL_SECONDS = 0.05
STALLED = "stalled"  # value of an order's "abort" key if a process stalled; "1" for any other failure
LOOPBACK = "127.0.0.1"
LOST = (RuntimeError, OSError)  # what a request raises once the store's server is gone


@dataclass(frozen=True)
class Report:
    """How a phase ended on one node. ``aborted``: its processes were killed because another node failed."""

    outcome: Literal["done", "failed", "stopped", "aborted"]
    cause: str = ""  # message for the user, with the end of the log
    mistake: bool = False  # the cause is a `UserError`: a restart would not help
    primary: bool = False  # the cause cannot be a consequence of another process's failure, such as SIGSEGV
    time: float = 0.0  # of the first failure, seconds since the epoch
    stalled: bool = False  # a process stalled
    last_seen: str = ""  # the last heartbeat of each process of the node, one line each


class Nodes:
    """This agent's connection to all agents of a run.

    The leader (rank 0) calls `order` and `reports`, the others `next_order`, and all of them `report`.
    """

    def __init__(self, node: NodeRank, starter: Starter | None = None, run_dir: Path | None = None) -> None:
        """Join the other agents. ``run_dir``: needed with several nodes, which must share it; it may not exist yet."""
        self.starter = starter or Starter()
        self.rank, self.count, self.address, self.port = node.rank, node.count, node.address, node.port
        self._server: StoreServer | None = None
        self._store = self._join(run_dir) if self.rank else self._open(run_dir)
        self._names: list[str] = []
        self._orders = 0
        self._kill: Callable[[bool], None] | None = None  # see `killable`
        self._lock = threading.Lock()  # guards `_kill`, so that it is not called once its phase has ended
        self._last_heartbeat: dict[int, tuple[bytes, float]] = {}  # rank -> (value, `Activity.time` when it changed)
        self.dead: dict[int, str] = {}  # rank -> message about the agent's death
        self.leader_lost = False
        self._activity = Activity()  # of this thread, the main one
        self._closing = threading.Event()
        if self.count > 1:
            self._meet()
        loop = self._exchange_heartbeats if self.count > 1 else self._check_activity
        threading.Thread(target=loop, daemon=True).start()

    def _open(self, run_dir: Path | None) -> StoreClient:
        """Leader: start the store's server, on loopback if there is only one node, and connect to it."""
        if self.count == 1:
            self.secret = new_secret()
        else:
            assert run_dir is not None
            self.secret = make_secret(run_dir)
        try:
            self._server = StoreServer(self.secret, LOOPBACK if self.address == LOOPBACK else "", self.port)
        except OSError as error:
            raise PhaseFailed(
                f"cannot listen on port {self.port} of {self.address} for the other nodes: {error}; set MASTER_PORT to "
                "a free port, or unset it to have one chosen"
            ) from error
        self.port = self._server.port
        if self.count > 1:
            assert run_dir is not None
            publish(run_dir, self.address, self.port)
        return StoreClient(LOOPBACK, self.port, self.secret, JOIN_TIMEOUT)

    def _join(self, run_dir: Path | None) -> StoreClient:
        assert run_dir is not None
        store, self.address, self.port, self.secret = join(run_dir, self.address, self.port, JOIN_TIMEOUT)
        return store

    def _meet(self) -> None:
        """Wait until all agents have joined; `PhaseFailed` names one that has not within `JOIN_TIMEOUT`."""
        self._store.set(f"host/{self.rank}", socket.gethostname())
        deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        for rank in range(self.count):
            while not self._store.check([f"host/{rank}"]):
                if time.monotonic() > deadline:
                    raise PhaseFailed(
                        f"node {rank} of {self.count} did not join within {JOIN_TIMEOUT}: see that node's output"
                    )
                time.sleep(POLL_SECONDS)
            self._names.append(f"node {rank} ({self._store.get(f'host/{rank}').decode()})")

    def name(self, rank: int | None = None) -> str:
        """The name of a node, by default this one, for messages: rank and host name."""
        return self._names[self.rank if rank is None else rank]

    @property
    def phase_id(self) -> str:
        """Prefix of the store's keys that the processes of the current phase use."""
        return f"phase{self._orders}"

    # --- the leader ---

    def order(self, **fields: Any) -> int:
        """Publish the next order to all agents; returns its number, which `reports` takes."""
        self._orders += 1
        self._store.set(f"order/{self._orders}", json.dumps(fields))
        return self._orders

    def reports(self, number: int) -> dict[int, Report]:
        """Wait for the reports of all nodes on an order, {rank: report}; an agent that died or left has failed."""
        found: dict[int, Report] = {}
        while True:
            for rank in range(self.count):
                if rank in found:
                    continue
                if self._store.check([f"report/{number}/{rank}"]):
                    found[rank] = Report(**json.loads(self._store.get(f"report/{number}/{rank}")))
                elif rank in self.dead:
                    found[rank] = Report("failed", self.dead[rank], primary=True)
                elif self._left(rank) and not self._store.check([f"report/{number}/{rank}"]):
                    cause = f"the agent of {self.name(rank)} left the run without a report: see that node's output"
                    found[rank] = Report("failed", cause, time=time.time())
            if len(found) == self.count:
                return found
            time.sleep(POLL_SECONDS)

    # --- the others ---

    def next_order(self) -> dict[str, Any]:
        """Wait for the leader's next order. Raises `PhaseFailed` once the leader is gone."""
        self._orders += 1
        key = f"order/{self._orders}"
        try:
            while not self._store.check([key]):
                time.sleep(POLL_SECONDS)  # not a blocking `get`, during which Python would handle no signal
            return {"number": self._orders, **json.loads(self._store.get(key))}
        except LOST as error:
            raise self.lost_leader() from error

    def lost_leader(self) -> PhaseFailed:
        """The exception to raise when the leader is gone."""
        return PhaseFailed(
            f"{self.name()} lost the agent of node 0 ({self.address}:{self.port}): "
            "it died, was stopped or hangs; see that node's output for the cause"
        )

    # --- all ---

    def report(self, report: Report) -> None:
        """Tell the leader how the current order ended here; unless it is done, all nodes abort it."""
        try:
            self._store.set(f"report/{self._orders}/{self.rank}", json.dumps(asdict(report)))
            if report.outcome != "done":
                self._store.set(f"abort/{self._orders}", STALLED if report.stalled else "1")
        except LOST as error:
            raise self.lost_leader() from error

    @contextlib.contextmanager
    def killable(self, kill: Callable[[bool], None]) -> Iterator[None]:
        """Inside the context, ``kill`` is called once another node aborts the current order or is lost.

        Its argument says whether the cause is a stalled process. It is called from a thread, perhaps repeatedly.
        """
        self._kill = kill
        try:
            yield
        finally:
            with self._lock:
                self._kill = None

    def aborted(self) -> bool:
        """Whether a node has aborted the current order, or is lost."""
        try:
            return self.leader_lost or bool(self.dead) or self._store.check([f"abort/{self._orders}"])
        except LOST:
            self.leader_lost = True
            return True

    def _check_activity(self) -> None:
        """Thread of an agent without others: reports on stderr when the main thread hangs."""
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._activity.check()

    def _exchange_heartbeats(self) -> None:
        """Thread: sends this agent's heartbeats, checks those of others, and calls `_kill` when an order is aborted.

        The heartbeat does not change while the main thread hangs, so that the other agents count this one as dead.
        """
        store = self._store.clone()  # the main thread may have a request pending on the other connection
        store.set_timeout(timedelta(seconds=LEADER_LOST_SECONDS))
        beats = 0
        while not self._closing.wait(HEARTBEAT_SECONDS):
            beats += self._activity.check()
            try:
                store.set(f"alive/{self.rank}", str(beats))
                self._find_dead(store)
                key, gone = f"abort/{self._orders}", self.dead or self.leader_lost
                reason = store.get(key).decode() if store.check([key]) else "1" if gone else ""
            except LOST:
                self.leader_lost, reason = True, "1"
            with self._lock:
                if reason and self._kill:
                    self._kill(reason == STALLED)
            if self.leader_lost:
                self._store.abort()  # with a hanging leader the main thread's request would go on waiting
                return

    def _find_dead(self, store: dist.Store) -> None:
        """The leader checks the heartbeats of all other agents; the others check the leader's.

        That the leader's store still answers says nothing: it has a thread of its own, but the main thread may hang.
        """
        now = self._activity.time
        for rank in range(1, self.count) if self.rank == 0 else (0,):
            key = f"alive/{rank}"
            heartbeat = store.get(key) if store.check([key]) else b""
            last, since = self._last_heartbeat.get(rank, (None, now))
            if heartbeat != last:
                self._last_heartbeat[rank] = heartbeat, now
            elif now - since <= DEAD_AFTER_SECONDS:
                continue
            elif rank == 0:
                self.leader_lost = True
            elif rank not in self.dead and not store.check([f"left/{rank}"]):
                self.dead[rank] = f"the agent of {self.name(rank)} died or hangs: no heartbeat for {now - since:.0f} s"
                store.set(f"abort/{self._orders}", "1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Leave the run; with an ``error``, report it first.

        The leader tells the others to end and waits until they have left, since the store ends with the leader.
        """
        with contextlib.suppress(*LOST, PhaseFailed):
            if error is not None and self.count > 1:
                stopped = isinstance(error, KeyboardInterrupt)
                cause = f"{self.name()}: {error!r}"
                self.report(Report("stopped" if stopped else "failed", cause, time=time.time()))
            if self.rank == 0:
                self.order(end=True)
                deadline = time.monotonic() + DEAD_AFTER_SECONDS
                while not all(self._left(rank) for rank in range(1, self.count)) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
            else:
                self._store.set(f"left/{self.rank}", "1")
        self._closing.set()
        self.starter.close()
        if self._server:
            self._server.close()

    def _left(self, rank: int) -> bool:
        return rank in self.dead or self._store.check([f"left/{rank}"])
