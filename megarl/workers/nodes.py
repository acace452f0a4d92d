"""The node agents of a run: one process per node, which meet in a store of torch (TCPStore) on the first node.

The agent of the first node, the leader, publishes an order for each phase; it alone writes events. Every agent starts
the processes of the phase on its own node and reports how they ended. When an agent reports a failure, or its
heartbeats stop, all others kill their processes of the phase at once.

Agents find the store through ``leader.json`` in the run directory: address, port, and an id drawn anew by each start,
by which the store of another start is told apart. The only node of a run has no store and listens nowhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist

from megarl.errors import PhaseFailed
from megarl.storage.files import make_directory, write_atomic
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import POLL_SECONDS, STALLED, Starter

HEARTBEAT_SECONDS = 0.1
DEAD_AFTER_SECONDS = 15.0  # without a heartbeat; less than Slurm's KillWait, so the cause is logged before a job dies
LEADER_LOST_SECONDS = 60.0  # without an answer of the leader's store: more than a busy machine or network needs
JOIN_SECONDS = 600.0  # nodes of one job start seconds apart, but may have to pull a container first
CONNECT_SECONDS = 15.0
HANGS_SECONDS = 600.0  # without CPU time the main thread counts as hanging; a healthy one polls all the time
LOOPBACK = "127.0.0.1"
LEFT = "left"  # the last heartbeat of an agent that leaves the run


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

    The leader (rank 0) calls `order` and `reports`, the others `next_order`, and all of them `report`. They leave
    messages for the thread of `_check`, and find its messages: a request to the store may hang with the leader.
    """

    def __init__(self, node: NodeRank, starter: Starter | None = None, run_dir: Path | None = None) -> None:
        """Join the other agents. ``run_dir``: needed with several nodes, which must share it; it may not exist yet."""
        self.starter = starter or Starter()
        self.rank, self.count, self.address, self.port = node.rank, node.count, node.address, node.port
        self._orders = 0
        self._own: Report | None = None  # on the current order
        self._messages: deque[tuple[str, str]] = deque()  # keys and values to set, in this order
        self._wanted: set[str] = set()  # keys whose values `_found` gets
        self._found: dict[str, str] = {}
        self._left: frozenset[int] = frozenset()  # ranks of agents that have left; what they reported is in `_found`
        self._leaving = self._has_left = False  # this agent; `_has_left`: the others know
        self._aborted = 0, ""  # an order that all nodes must end, and the reason
        self._polls = self._answered = 0  # of the main thread: all, and those before the last answer of the store
        self._last_heartbeat: dict[int, tuple[str, int]] = {}  # rank -> (value, number of checks when it changed)
        self.dead: dict[int, str] = {}  # rank -> message about the agent's death
        self.leader_lost = False
        self._closing = threading.Event()
        self._store: dist.Store | None = None
        self._of_phase: dist.TCPStore | None = None  # the leader's for the processes of the current phase
        self.phase_store = ""  # where these find it; "" on the only node
        self._fixed_port = self.port != 0
        if self.count > 1:
            assert run_dir is not None
            self._store = self._join(run_dir) if self.rank else self._open(run_dir)
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.Thread(target=self._check, args=(clock,), daemon=True)
        self._thread.start()
        if self.count > 1:
            self._meet()

    def _open(self, run_dir: Path) -> dist.Store:
        """Leader: open the store and say where it is."""
        store = _serve(self.port)
        self.port = store.port
        store.set("id", identity := secrets.token_hex(8))
        make_directory(run_dir)
        leader = {"address": self.address, "port": self.port, "id": identity}
        write_atomic(run_dir / "leader.json", json.dumps(leader))
        return store

    def _join(self, run_dir: Path) -> dist.Store:
        """Others: connect to the leader's store, waiting until it listens; `PhaseFailed` after `JOIN_SECONDS`."""
        deadline, file = time.monotonic() + JOIN_SECONDS, run_dir / "leader.json"
        while True:
            try:
                leader = json.loads(file.read_text())
                if not self._fixed_port:
                    self.address, self.port = leader["address"], leader["port"]
                return _connect(self.address, self.port, leader["id"])
            except (OSError, ValueError, KeyError, TypeError) as error:  # no file yet, or that of an earlier start
                if time.monotonic() > deadline:
                    where = f"{self.address}:{self.port}" if self._fixed_port else f"the address in {file}"
                    raise PhaseFailed(
                        f"cannot reach node 0 at {where}: {error}; the run directory must lie on a file system that "
                        "all nodes share, and MASTER_ADDR, if set, must name the first node"
                    ) from error
            time.sleep(POLL_SECONDS)

    def _meet(self) -> None:
        """Wait until all agents have joined; `PhaseFailed` names one that has not within `JOIN_SECONDS`."""
        self._put(f"host/{self.rank}", socket.gethostname())
        deadline = time.monotonic() + JOIN_SECONDS
        for rank in range(self.count):
            while self._get(f"host/{rank}") is None:
                if time.monotonic() > deadline:
                    raise PhaseFailed(
                        f"node {rank} of {self.count} did not join within {JOIN_SECONDS:.0f} s: see that node's output"
                    )
                self._poll()

    def name(self, rank: int | None = None) -> str:
        """The name of a node, by default this one, for messages: rank and host name."""
        rank = self.rank if rank is None else rank
        host = self._found.get(f"host/{rank}")
        return f"node {rank} ({host})" if host else f"node {rank}"

    def _put(self, key: str, value: str) -> None:
        self._messages.append((key, value))

    def _get(self, key: str) -> str | None:
        """A value of another agent; None as long as it is not known here."""
        self._wanted.add(key)
        return self._found.get(key)

    def _poll(self) -> None:
        """Let a moment pass. Raises `PhaseFailed` once the leader is gone."""
        if self._leader_gone():
            raise self.lost_leader()
        time.sleep(POLL_SECONDS)

    def _leader_gone(self) -> bool:
        """Time is counted in calls, so that it does not pass while this process is suspended."""
        self._polls += 1
        silent = (self._polls - self._answered) * POLL_SECONDS
        self.leader_lost = self.leader_lost or (self.rank > 0 and silent > LEADER_LOST_SECONDS)
        return self.leader_lost

    # --- the leader ---

    def order(self, **fields: Any) -> int:
        """Publish the next order to all agents; returns its number, which `reports` takes.

        With several nodes the processes of a phase get a store of their own, since torch writes keys there, such as the
        report of an NCCL error, that the processes of the next attempt must not see.
        """
        self._orders += 1
        if self.count > 1:
            self._of_phase = None  # closes it: the next one may have the same port
            if not fields.get("end"):
                self._of_phase = _serve(self.port + 1 if self._fixed_port else 0)
                self.phase_store = f"{self.address}:{self._of_phase.port}"
            self._wanted |= {f"report/{self._orders}/{rank}" for rank in range(1, self.count)}
            self._put(f"order/{self._orders}", json.dumps(fields | {"store": self.phase_store}))
        return self._orders

    def reports(self, number: int) -> dict[int, Report]:
        """Wait for the reports of all nodes on an order, {rank: report}; an agent that died or left has failed."""
        assert self._own is not None
        found = {self.rank: self._own}
        while len(found) < self.count:
            for rank in range(1, self.count):
                if rank in found:
                    continue
                left = rank in self._left
                if said := self._get(f"report/{number}/{rank}"):
                    found[rank] = Report(**json.loads(said))
                elif rank in self.dead:
                    found[rank] = Report("failed", self.dead[rank], primary=True)
                elif left:
                    cause = f"the agent of {self.name(rank)} left the run without a report: see that node's output"
                    found[rank] = Report("failed", cause, time=time.time())
            self._poll()
        return found

    # --- the others ---

    def next_order(self) -> dict[str, Any]:
        """Wait for the leader's next order. Raises `PhaseFailed` once the leader is gone."""
        self._orders += 1
        while (said := self._get(f"order/{self._orders}")) is None:
            self._poll()
        order: dict[str, Any] = json.loads(said)
        self.phase_store = order["store"]
        return order

    def lost_leader(self) -> PhaseFailed:
        """The exception to raise when the leader is gone."""
        return PhaseFailed(
            f"{self.name()} lost the agent of node 0 ({self.address}:{self.port}): "
            "it died, was stopped or hangs; see that node's output for the cause"
        )

    # --- all ---

    def report(self, report: Report) -> None:
        """Tell the leader how the current order ended here; unless it is done, all nodes abort it."""
        self._own = report
        if self.count == 1:
            return
        self._put(f"report/{self._orders}/{self.rank}", json.dumps(asdict(report)))
        if report.outcome != "done":
            self._put(f"abort/{self._orders}", STALLED if report.stalled else "1")

    def aborted(self) -> str:
        """Why this node must end the current order at once: `STALLED`, or "1" for any other reason; "" if it need not.

        It follows another node's report with the delay of a heartbeat. To be called every `POLL_SECONDS`.
        """
        order, reason = self._aborted
        if self.count > 1 and self._leader_gone():
            return "1"
        return reason if order == self._orders else ""

    def _check(self, clock: int) -> None:
        """Thread: checks that the main thread, whose CPU time ``clock`` shows, does not hang, and exchanges messages.

        Time is counted in checks, so that it does not pass while the whole process is suspended. The heartbeat does not
        change while the main thread hangs, so that the other agents count this one as dead.
        """
        spent, active, beats, number = 0.0, 0, 0, 0  # ``active``: the check at which the main thread last used the CPU
        while not self._closing.wait(HEARTBEAT_SECONDS):
            number += 1
            before, spent = spent, time.clock_gettime(clock)
            if spent != before:
                active = number
            idle = (number - active) * HEARTBEAT_SECONDS
            if idle < HANGS_SECONDS:
                beats += 1
            elif idle < HANGS_SECONDS + HEARTBEAT_SECONDS:
                _print_stacks(idle)
            if self._store is not None:
                try:
                    self._exchange(self._store, str(beats), number)
                except RuntimeError:  # the store's server is gone
                    self.leader_lost = True
                    return

    def _exchange(self, store: dist.Store, heartbeat: str, number: int) -> None:
        """Check ``number``: send a heartbeat and messages, fetch those of others, see if the order is aborted."""
        order, polls, leaving = self._orders, self._polls, self._leaving
        while self._messages:
            store.set(*self._messages[0])
            self._messages.popleft()
        store.set(f"alive/{self.rank}", LEFT if leaving else heartbeat)
        self._has_left = leaving
        left = self._find_dead(store, number)
        for key in [key for key in list(self._wanted) if key not in self._found and store.check([key])]:
            self._found[key] = store.get(key).decode()
        aborted = store.get(f"abort/{order}").decode() if store.check([f"abort/{order}"]) else ""
        self._aborted = order, aborted or ("1" if self.dead or self.leader_lost else "")
        self._left, self._answered = left, polls

    def _find_dead(self, store: dist.Store, number: int) -> frozenset[int]:
        """The leader checks the heartbeats of all other agents; the others check the leader's. Returns who has left.

        That the leader's store still answers says nothing: it has a thread of its own, but the main thread may hang.
        """
        left = set()
        for rank in range(1, self.count) if self.rank == 0 else (0,):
            key = f"alive/{rank}"
            heartbeat = store.get(key).decode() if store.check([key]) else ""
            last, since = self._last_heartbeat.get(rank, (None, number))
            silent = (number - since) * HEARTBEAT_SECONDS
            if heartbeat == LEFT:
                left.add(rank)
            elif not heartbeat:  # it has not joined yet
                continue
            elif heartbeat != last:
                self._last_heartbeat[rank] = heartbeat, number
            elif silent <= DEAD_AFTER_SECONDS:
                continue
            elif rank == 0:
                self.leader_lost = True
            elif rank not in self.dead:
                self.dead[rank] = f"the agent of {self.name(rank)} died or hangs: no heartbeat for {silent:.0f} s"
                store.set(f"abort/{self._orders}", "1")
        return frozenset(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Leave the run; with an ``error``, report it first.

        The leader tells the others to end and waits until they have left, since the store ends with the leader.
        """
        try:
            if error is not None and self.count > 1:
                stopped = isinstance(error, KeyboardInterrupt)
                self.report(Report("stopped" if stopped else "failed", f"{self.name()}: {error!r}", time=time.time()))
            if self.rank == 0:
                self.order(end=True)
            self._leaving = True
            deadline = time.monotonic() + DEAD_AFTER_SECONDS
            while not self._may_end() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            self._closing.set()
            self._store = None

    def _may_end(self) -> bool:
        if self.rank == 0:
            return all(rank in self._left or rank in self.dead for rank in range(1, self.count))
        return self._has_left or self.leader_lost


def _serve(port: int) -> dist.TCPStore:
    """A store on this machine, for all who reach the port; 0: a free one. `PhaseFailed` if the port is taken."""
    try:
        return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise PhaseFailed(
            f"cannot listen on port {port} for the other nodes: {error}; set MASTER_PORT to the first of two free "
            "ports, or unset it to have them chosen"
        ) from error


def _connect(address: str, port: int, identity: str) -> dist.TCPStore:
    """The leader's store. OSError if nobody or another start answers there.

    From a thread of its own, because torch waits without limit for the answer of whoever listens at the address.
    """
    found: list[dist.TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            limit = timedelta(seconds=CONNECT_SECONDS)
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
            if store.check(["id"]) and store.get("id").decode() == identity:
                found.append(store)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2 * CONNECT_SECONDS)
    if not found:
        raise ConnectionError("the store of this start does not answer there")
    return found[0]


def _print_stacks(idle: float) -> None:
    text = (
        f"megarl: no progress for {idle:.0f} s: this node agent hangs, most often because a file system "
        "does not respond. It continues as soon as the file system does. Its stack:\n"
    )
    os.write(2, text.encode())  # bypasses the progress display, in which the thread may hang
    faulthandler.dump_traceback(2)
