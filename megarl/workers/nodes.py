"""The node agents of a run: one a node, of which the first leads and alone writes; they meet in the leader's store.

The leader orders phases one after another; every agent starts its own processes of a phase and reports how they ended.
An agent that dies is noticed by its missing heartbeat, a failed phase by its report, and the others end theirs at once.
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
from megarl.workers.meeting import join, make_secret, publish
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import Starter

HEARTBEAT_SECONDS = 0.5
DEAD_AFTER_SECONDS = 15.0  # below Slurm's KillWait: the cause is known before the job is killed
LEADER_LOST_SECONDS = 60.0  # without an answer of its store: more than a busy machine or file system takes
JOIN_TIMEOUT = timedelta(minutes=10)  # nodes of one job start seconds apart, but may first pull a container
POLL_SECONDS = 0.05
STALLED = "stalled"  # why the others end an order
LOOPBACK = "127.0.0.1"
LOST = (RuntimeError, OSError)  # what a store raises once its server is gone


@dataclass(frozen=True)
class Report:
    """How a phase ended on one node. ``aborted``: its processes were ended because of another node."""

    outcome: Literal["done", "failed", "stopped", "aborted"]
    cause: str = ""  # for a person, log included
    mistake: bool = False  # the cause is a `UserError`: trying again would not help
    primary: bool = False  # killed by a signal that is never the consequence of another process's failure
    time: float = 0.0  # of the first failure, seconds since the epoch
    stalled: bool = False  # something stood still
    seen: str = ""  # where the processes of the node were last seen, a line each


class Nodes:
    """All agents of a run. On rank 0 `order` and `reports`, on the others `next_order`, on all of them `report`."""

    def __init__(self, node: NodeRank, starter: Starter | None = None, run_dir: Path | None = None) -> None:
        """``run_dir``: shared by all nodes, where there are several; it need not exist yet."""
        self.starter = starter or Starter()
        self.rank, self.count, self.address, self.port = node.rank, node.count, node.address, node.port
        self._server: StoreServer | None = None
        self._store = self._join(run_dir) if self.rank else self._open(run_dir)
        self._names: list[str] = []
        self._orders = 0
        self._kill: Callable[[bool], None] | None = None
        self._lock = threading.Lock()  # between the end of a phase and an order to end it
        self._last_sign: dict[int, tuple[bytes, float]] = {}  # rank -> heartbeat, when it changed (`Activity.time`)
        self.dead: dict[int, str] = {}  # rank -> what is known
        self.leader_lost = False
        self._activity = Activity()  # of this thread
        self._closing = threading.Event()
        if self.count > 1:
            self._meet()
        self._watch = threading.Thread(target=self._beat if self.count > 1 else self._look, daemon=True)
        self._watch.start()

    def _open(self, run_dir: Path | None) -> StoreClient:
        """The leader hosts the store: on loopback where nobody else is to come."""
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
                "a free one, or leave it out"
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
        """Everybody has come, or a `PhaseFailed` that says who has not."""
        self._store.set(f"host/{self.rank}", socket.gethostname())
        deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        for rank in range(self.count):
            while not self._store.check([f"host/{rank}"]):
                if time.monotonic() > deadline:
                    raise PhaseFailed(
                        f"node {rank} of {self.count} did not join within {JOIN_TIMEOUT}: see its own log"
                    )
                time.sleep(POLL_SECONDS)
            self._names.append(f"node {rank} ({self._store.get(f'host/{rank}').decode()})")

    def name(self, rank: int | None = None) -> str:
        """A node, by default this one, as messages call it."""
        return self._names[self.rank if rank is None else rank]

    @property
    def phase_id(self) -> str:
        """What the processes of the current phase prefix their keys in the store with."""
        return f"phase{self._orders}"

    # --- the leader ---

    def order(self, **fields: Any) -> int:
        """Publish the next order; returns its number."""
        self._orders += 1
        self._store.set(f"order/{self._orders}", json.dumps(fields))
        return self._orders

    def reports(self, number: int) -> dict[int, Report]:
        """The report of every node on an order; of a dead one a failure that says so."""
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
                    cause = f"the agent of {self.name(rank)} left: see its output"
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
                time.sleep(POLL_SECONDS)  # in Python, so that a signal is handled meanwhile
            return {"number": self._orders, **json.loads(self._store.get(key))}
        except LOST as error:
            raise self.lost_leader() from error

    def lost_leader(self) -> PhaseFailed:
        return PhaseFailed(
            f"{self.name()} lost the agent of node 0 ({self.address}:{self.port}): "
            "it died, was stopped or stands still, its output has the cause"
        )

    # --- all ---

    def report(self, report: Report) -> None:
        """Tell the leader how the current order ended here, and have everybody end it unless it is done."""
        try:
            self._store.set(f"report/{self._orders}/{self.rank}", json.dumps(asdict(report)))
            if report.outcome != "done":
                self._store.set(f"abort/{self._orders}", STALLED if report.stalled else "1")
        except LOST as error:
            raise self.lost_leader() from error

    @contextlib.contextmanager
    def killable(self, kill: Callable[[bool], None]) -> Iterator[None]:
        """Within, ``kill`` is called (from a thread, perhaps repeatedly) once the phase ended badly on another node.

        It is told whether something stood still there.
        """
        self._kill = kill
        try:
            yield
        finally:
            with self._lock:
                self._kill = None

    def aborted(self) -> bool:
        """Whether another node ended the current order, or is gone."""
        try:
            return self.leader_lost or bool(self.dead) or self._store.check([f"abort/{self._orders}"])
        except LOST:
            self.leader_lost = True
            return True

    def _look(self) -> None:
        """Of a node that is alone."""
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._activity.look()

    def _beat(self) -> None:
        """An agent whose main thread does nothing for too long counts as dead."""
        store = self._store.clone()  # a connection of its own: the other may be waiting
        store.set_timeout(timedelta(seconds=LEADER_LOST_SECONDS))
        beats = 0
        while not self._closing.wait(HEARTBEAT_SECONDS):
            beats += self._activity.look()
            try:
                store.set(f"alive/{self.rank}", str(beats))
                self._look_for_dead(store)
                key, gone = f"abort/{self._orders}", self.dead or self.leader_lost
                reason = store.get(key).decode() if store.check([key]) else "1" if gone else ""
            except LOST:
                self.leader_lost, reason = True, "1"
            with self._lock:
                if reason and self._kill:
                    self._kill(reason == STALLED)
            if self.leader_lost:
                self._store.give_up()  # with a leader that stands still the other would wait on
                return

    def _look_for_dead(self, store: dist.Store) -> None:
        """The leader looks for the others, they for the leader, whose store may answer when it does nothing itself."""
        now = self._activity.time
        for rank in range(1, self.count) if self.rank == 0 else (0,):
            key = f"alive/{rank}"
            sign = store.get(key) if store.check([key]) else b""
            last, since = self._last_sign.get(rank, (None, now))
            if sign != last:
                self._last_sign[rank] = sign, now
            elif now - since <= DEAD_AFTER_SECONDS:
                continue
            elif rank == 0:
                self.leader_lost = True
            elif rank not in self.dead and not store.check([f"left/{rank}"]):
                self.dead[rank] = (
                    f"the agent of {self.name(rank)} died or stands still: no sign of life for {now - since:.0f} s"
                )
                store.set(f"abort/{self._orders}", "1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """The leader dismisses the others and waits for them, since the store ends with it; they say why they left."""
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
