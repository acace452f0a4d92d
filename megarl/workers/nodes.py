"""The node agents of a run: one process per node, which communicate through a key-value store on the first node.

The agent of the first node, the leader, publishes an order for each phase; it alone writes events. Every agent starts
the processes of the phase on its own node and reports how they ended. When an agent reports a failure, or its
heartbeats stop, all others kill their processes of the phase at once.

Agents of several nodes find the leader's store through two files in the run directory. ``secret``: 32 random bytes,
created once per run, which only their owner can read. ``leader.json``: address and port of the leader's store; one of
an earlier start is harmless: nothing listens there, or a store with another secret.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

from megarl.errors import PhaseFailed, UserError
from megarl.keystore import DIGEST, StoreClient, StoreServer, new_secret
from megarl.storage.files import make_directory, write_atomic
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import STALLED, Starter

HEARTBEAT_SECONDS = 0.5
DEAD_AFTER_SECONDS = 15.0  # without a heartbeat; less than Slurm's KillWait, so the cause is logged before a job dies
LEADER_LOST_SECONDS = 60.0  # timeout of a request to the leader's store: more than a busy machine or file system needs
JOIN_TIMEOUT = timedelta(minutes=10)  # nodes of one job start seconds apart, but may have to pull a container first
POLL_SECONDS = 0.05
HANGS_SECONDS = 600.0  # without CPU time the main thread counts as hanging; a healthy one polls all the time
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
        self._aborted = 0, ""  # an order that all nodes must end, and the reason; written by the thread
        self._last_heartbeat: dict[int, tuple[bytes, int]] = {}  # rank -> (value, number of checks when it changed)
        self.dead: dict[int, str] = {}  # rank -> message about the agent's death
        self.leader_lost = False
        self._closing = threading.Event()
        if self.count > 1:
            self._meet()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._check, args=(clock,), daemon=True).start()

    def _open(self, run_dir: Path | None) -> StoreClient:
        """Leader: start the store's server, on loopback if there is only one node, and connect to it."""
        self.secret = new_secret() if run_dir is None or self.count == 1 else make_secret(run_dir)
        try:
            self._server = StoreServer(self.secret, LOOPBACK if self.address == LOOPBACK else "", self.port)
        except OSError as error:
            raise PhaseFailed(
                f"cannot listen on port {self.port} of {self.address} for the other nodes: {error}; set MASTER_PORT to "
                "a free port, or unset it to have one chosen"
            ) from error
        self.port = self._server.port
        if run_dir is not None and self.count > 1:
            write_atomic(run_dir / "leader.json", json.dumps({"address": self.address, "port": self.port}))
        return StoreClient(LOOPBACK, self.port, self.secret, JOIN_TIMEOUT)

    def _join(self, run_dir: Path | None) -> StoreClient:
        """Others: connect to the leader's store, waiting until it listens; `PhaseFailed` after `JOIN_TIMEOUT`."""
        assert run_dir is not None
        deadline, fixed = time.monotonic() + JOIN_TIMEOUT.total_seconds(), self.port != 0
        while True:
            try:
                self.secret = read_secret(run_dir)
                if not fixed:
                    leader = json.loads((run_dir / "leader.json").read_text())
                    self.address, self.port = leader["address"], leader["port"]
                return StoreClient(self.address, self.port, self.secret, JOIN_TIMEOUT)
            except (OSError, ValueError, KeyError) as error:  # no files yet, or those of an earlier start
                if time.monotonic() > deadline:
                    where = f"{self.address}:{self.port}" if fixed else f"the address in {run_dir / 'leader.json'}"
                    raise PhaseFailed(
                        f"cannot reach node 0 at {where}: {error}; the run directory must lie on a file system that "
                        "all nodes share, and MASTER_ADDR, if set, must name the first node"
                    ) from error
            time.sleep(POLL_SECONDS)

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
            return dict(json.loads(self._store.get(key)))
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

    def aborted(self) -> str:
        """Why this node must end the current order at once: `STALLED`, or "1" for any other reason; "" if it need not.

        It follows another node's report with the delay of a heartbeat, and asks no other process.
        """
        order, reason = self._aborted
        return reason if order == self._orders else ""

    def _check(self, clock: int) -> None:
        """Thread: checks that the main thread, whose CPU time ``clock`` shows, does not hang, and exchanges heartbeats.

        Time is counted in checks, so that it does not pass while the whole process is suspended. The heartbeat does not
        change while the main thread hangs, so that the other agents count this one as dead.
        """
        store = self._store.clone() if self.count > 1 else None  # the other connection may have a request pending
        if store:
            store.set_timeout(timedelta(seconds=LEADER_LOST_SECONDS))
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
            if store and not self._exchange_heartbeats(store, str(beats), number):
                return

    def _exchange_heartbeats(self, store: StoreClient, heartbeat: str, number: int) -> bool:
        """Check ``number``: send a heartbeat, check those of others, see if the order is aborted.

        False once the leader is lost.
        """
        order, reason = self._orders, ""
        try:
            store.set(f"alive/{self.rank}", heartbeat)
            self._find_dead(store, number)
            if store.check([f"abort/{order}"]):
                reason = store.get(f"abort/{order}").decode()
        except LOST:
            self.leader_lost = True
        self._aborted = order, reason or ("1" if self.dead or self.leader_lost else "")
        if self.leader_lost:
            self._store.abort()  # with a hanging leader the main thread's request would go on waiting
        return not self.leader_lost

    def _find_dead(self, store: StoreClient, number: int) -> None:
        """The leader checks the heartbeats of all other agents; the others check the leader's.

        That the leader's store still answers says nothing: it has a thread of its own, but the main thread may hang.
        """
        for rank in range(1, self.count) if self.rank == 0 else (0,):
            key = f"alive/{rank}"
            heartbeat = store.get(key) if store.check([key]) else b""
            last, since = self._last_heartbeat.get(rank, (None, number))
            silent = (number - since) * HEARTBEAT_SECONDS
            if heartbeat != last:
                self._last_heartbeat[rank] = heartbeat, number
            elif silent <= DEAD_AFTER_SECONDS:
                continue
            elif rank == 0:
                self.leader_lost = True
            elif rank not in self.dead and not store.check([f"left/{rank}"]):
                self.dead[rank] = f"the agent of {self.name(rank)} died or hangs: no heartbeat for {silent:.0f} s"
                store.set(f"abort/{self._orders}", "1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Leave the run; with an ``error``, report it first.

        The leader tells the others to end and waits until they have left, since the store ends with the leader.
        """
        try:
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
        finally:
            self._closing.set()
            self.starter.close()
            if self._server:
                self._server.close()

    def _left(self, rank: int) -> bool:
        return rank in self.dead or self._store.check([f"left/{rank}"])


def _print_stacks(idle: float) -> None:
    text = (
        f"megarl: no progress for {idle:.0f} s: this node agent hangs, most often because a file system "
        "does not respond. It continues as soon as the file system does. Its stack:\n"
    )
    os.write(2, text.encode())  # bypasses the progress display, in which the thread may hang
    faulthandler.dump_traceback(2)


def make_secret(run_dir: Path) -> bytes:
    """The run's secret, which is created if there is none yet. Called by the leader."""
    make_directory(run_dir)
    path = run_dir / "secret"
    if not path.exists():
        write_atomic(path, new_secret(), 0o600)
    return read_secret(run_dir)


def read_secret(run_dir: Path) -> bytes:
    """The run's secret.

    FileNotFoundError if the leader has not created it yet; `UserError` if the file is damaged, is another user's, or
    can be read or written by other users.
    """
    path = run_dir / "secret"
    about = path.stat()
    if about.st_mode & 0o077 or about.st_uid != os.geteuid():
        raise UserError(
            f"{path} must belong to the user who starts the run and be readable by nobody else: chmod 600 it, or "
            "delete it while the run is stopped"
        )
    secret = path.read_bytes()
    if len(secret) != DIGEST:
        raise UserError(f"{path} is damaged: delete it while the run is stopped, and start the run again")
    return secret
