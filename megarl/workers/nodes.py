"""The node agents of a run: one process per node, which meet in a store of torch (TCPStore) on the first node.

The first agent decides which phase is next and records it in events.jsonl, where the others find it. In the store they
only wait for each other at each attempt at a phase, and say how it ended. When an attempt fails on a node, or the
heartbeats of its agent stop, all others kill their processes of the phase at once.

Agents find the store through ``leader.json`` in the run directory: address, port, and an id drawn anew by each start,
by which the store of another start is told apart. The only node of a run listens nowhere.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn, Self

import torch.distributed as dist

from megarl.errors import PhaseFailed
from megarl.storage.files import make_directory, write_atomic
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import POLL_SECONDS, STALLED, Starter

HEARTBEAT_SECONDS = 0.1
DEAD_AFTER_SECONDS = 15.0  # without a heartbeat; less than Slurm's KillWait, so the cause is logged before a job dies
LEADER_LOST_SECONDS = 60.0  # without an answer of the store: more than a busy machine or network needs
JOIN_SECONDS = 600.0  # nodes of one job start seconds apart, but may have to pull a container first
CONNECT_SECONDS = 15.0
HANGS_SECONDS = 600.0  # without CPU time the main thread counts as hanging; a healthy one polls all the time
LOOPBACK = "127.0.0.1"
END = "end"  # in place of the address of a phase's store: the run ends


@dataclass(frozen=True)
class Report:
    """How an attempt at a phase ended on one node. ``aborted``: it was killed because another node failed."""

    outcome: Literal["done", "failed", "stopped", "aborted"]
    cause: str = ""  # message for the user, with the end of the log
    mistake: bool = False  # the cause is a `UserError`: a restart would not help
    primary: bool = False  # the cause cannot be a consequence of another process's failure, such as SIGSEGV
    time: float = 0.0  # of the first failure, seconds since the epoch
    stalled: bool = False  # a process stalled
    last_seen: str = ""  # the last heartbeat of each process of the node, one line each


class Nodes:
    """This agent's connection to all agents of a run.

    At each attempt at a phase the first agent (rank 0) calls `begin`, the others `meet`; then each calls `report`, and
    the first one `reports`.
    """

    def __init__(self, node: NodeRank, starter: Starter | None = None, run_dir: Path | None = None) -> None:
        """Join the other agents. ``run_dir``: needed with several nodes, which must share it; it may not exist yet."""
        self.starter = starter or Starter()
        self.rank, self.count, self._address, self._port = node.rank, node.count, node.address, node.port
        self._attempt = 0
        self._beats = 0  # heartbeats of this agent
        self._silent = 0  # checks since the last answer of the store
        self.dead: dict[int, str] = {}  # rank -> message about the agent's death; only the first agent notices
        self._closing = threading.Event()
        self._store: dist.Store = dist.HashStore()
        self._of_phase: dist.TCPStore | None = None  # the store for the processes of the current attempt
        self.phase_store = ""  # where these find it; "" on the only node
        if self.count > 1:
            assert run_dir is not None
            self._store = self._join(run_dir) if self.rank else self._open(run_dir)
            threading.Thread(target=self._exchange, daemon=True).start()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._check, args=(clock,), daemon=True).start()
        if self.count > 1:
            self._wait_for_all()

    def _open(self, run_dir: Path) -> dist.Store:
        """First agent: open the store and say where it is."""
        store = _serve(self._port)
        store.set("alive/0", "0")
        store.set("id", identity := secrets.token_hex(8))
        make_directory(run_dir)
        place = {"address": self._address, "port": store.port, "id": identity}
        write_atomic(run_dir / "leader.json", json.dumps(place))
        return store

    def _join(self, run_dir: Path) -> dist.Store:
        """Others: connect to the store, waiting until it is there; `PhaseFailed` after `JOIN_SECONDS`."""
        deadline, file = time.monotonic() + JOIN_SECONDS, run_dir / "leader.json"
        while True:
            try:
                return _connect(**json.loads(file.read_text()))
            except (OSError, ValueError, TypeError) as error:  # no file yet, or that of an earlier start
                if time.monotonic() > deadline:
                    raise PhaseFailed(
                        f"cannot reach node 0 at the address in {file}: {error}; the run directory must lie on a file "
                        "system that all nodes share, and MASTER_ADDR, if set, must name the first node"
                    ) from error
            time.sleep(POLL_SECONDS)

    def _wait_for_all(self) -> None:
        """Wait until all agents have joined; `PhaseFailed` names one that has not within `JOIN_SECONDS`."""
        self._set(f"host/{self.rank}", socket.gethostname())
        deadline = time.monotonic() + JOIN_SECONDS
        for rank in range(self.count):
            while not self._get(f"host/{rank}"):
                if time.monotonic() > deadline:
                    raise PhaseFailed(
                        f"node {rank} of {self.count} did not join within {JOIN_SECONDS:.0f} s: see that node's output"
                    )
                time.sleep(POLL_SECONDS)

    def name(self, rank: int | None = None) -> str:
        """The name of a node, by default this one, for messages: rank and host name."""
        if rank is None:
            return f"node {self.rank} ({socket.gethostname()})"
        return f"node {rank} ({self._get(f'host/{rank}')})"

    def _set(self, key: str, value: str) -> None:
        with self._needs_store():
            self._store.set(key, value)

    def _get(self, key: str) -> str:
        """The value of a key; "" as long as it has none."""
        with self._needs_store():
            return self._store.get(key).decode() if self._store.check([key]) else ""

    @contextlib.contextmanager
    def _needs_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            if self.rank == 0:
                raise
            self._lose_first()

    def _lose_first(self) -> NoReturn:
        """End this agent at once, and with it its processes: a thread calls this while the main thread may hang."""
        cause = "it died, was stopped or hangs; see that node's output for the cause"
        os.write(2, f"megarl: {self.name()} lost the agent of node 0: {cause}\n".encode())
        os._exit(1)

    # --- attempts at phases ---

    def begin(self, written: int = 0) -> None:
        """First agent: begin an attempt at a phase, which the first ``written`` bytes of events.jsonl name already.

        With several nodes the processes get a store of their own, since torch writes keys there, such as the report of
        an NCCL error, that the processes of the next attempt must not see.
        """
        if self.count > 1:
            self._of_phase = None  # closes it: the next one may have the same port
            self._of_phase = _serve(self._port and self._port + 1)
            self.phase_store = f"{self._address}:{self._of_phase.port}"
            self._set(f"store/{self._attempt + 1}", f"{self.phase_store} {written}")
        self._attempt += 1

    def meet(self) -> int | None:
        """Others: wait until the first agent begins an attempt; its ``written``, or None if it ends the run instead."""
        self._attempt += 1
        while not (place := self._get(f"store/{self._attempt}")):
            time.sleep(POLL_SECONDS)
        self.phase_store, _, written = place.partition(" ")
        return None if place == END else int(written)

    def report(self, report: Report) -> None:
        """Say how the attempt ended here; unless it is done, all nodes abort it."""
        self._set(f"report/{self._attempt}/{self.rank}", json.dumps(asdict(report)))
        if report.outcome != "done":
            self._set(f"abort/{self._attempt}", STALLED if report.stalled else "1")

    def reports(self) -> dict[int, Report]:
        """First agent: wait until the attempt has ended on all nodes, {rank: report}; an agent that died has failed."""
        found = {}
        for rank in range(self.count):
            while not (said := self._get(f"report/{self._attempt}/{rank}")) and rank not in self.dead:
                time.sleep(POLL_SECONDS)
            found[rank] = Report(**json.loads(said)) if said else Report("failed", self.dead[rank], primary=True)
        return found

    def aborted(self) -> str:
        """Why this node must end the attempt at once: `STALLED`, or "1" for any other reason; "" if it need not."""
        return self._get(f"abort/{self._attempt}") or ("1" if self.dead else "")

    # --- threads ---

    def _check(self, clock: int) -> None:
        """Check that the main thread, whose CPU time ``clock`` shows, does not hang, and that the store answers.

        Time is counted in checks, so that it does not pass while the whole process is suspended. The heartbeat does not
        change while the main thread hangs, so that the other agents count this one as dead.
        """
        spent, active, number = 0.0, 0, 0  # ``active``: the check at which the main thread last used the CPU
        while not self._closing.wait(HEARTBEAT_SECONDS):
            number += 1
            before, spent = spent, time.clock_gettime(clock)
            if spent != before:
                active = number
            idle = (number - active) * HEARTBEAT_SECONDS
            if idle < HANGS_SECONDS:
                self._beats += 1
            elif idle < HANGS_SECONDS + HEARTBEAT_SECONDS:
                _print_stacks(idle)
            self._silent += 1
            if self.rank and self._silent * HEARTBEAT_SECONDS > LEADER_LOST_SECONDS:
                self._lose_first()

    def _exchange(self) -> None:
        """Send heartbeats, and notice when those of others stop: the first agent of any, the others of the first.

        That its store still answers says nothing: it has a thread of its own.
        """
        others = range(1) if self.rank else range(1, self.count)
        keys, number = [f"alive/{rank}" for rank in others], 0
        last: dict[int, tuple[bytes, int]] = {}  # rank -> (heartbeat, number of the check that first saw it)
        while not self._closing.wait(HEARTBEAT_SECONDS):
            number += 1
            try:
                self._store.set(f"alive/{self.rank}", str(self._beats))
                beats = self._store.multi_get(keys) if self._store.check(keys) else []
            except RuntimeError:
                if self._closing.is_set():
                    return
                self._lose_first()
            self._silent = 0
            for rank, beat in zip(others, beats, strict=False):  # none until all have joined
                if last.get(rank, (b"", 0))[0] != beat:
                    last[rank] = beat, number
                elif (number - last[rank][1]) * HEARTBEAT_SECONDS > DEAD_AFTER_SECONDS:
                    if self.rank:
                        self._lose_first()
                    silent = f"no heartbeat for {DEAD_AFTER_SECONDS:.0f} s"
                    self.dead[rank] = f"the agent of {self.name(rank)} died or hangs: {silent}"
                    self._store.set(f"abort/{self._attempt}", "1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Leave the run; with an ``error``, report it first.

        The first agent ends the run and waits until the others have left, since the store ends with it.
        """
        try:
            if error is not None:
                stopped = isinstance(error, KeyboardInterrupt)
                self.report(Report("stopped" if stopped else "failed", f"{self.name()}: {error!r}", time=time.time()))
            if self.rank:
                self._closing.set()  # from then on the first agent may end
                with self._needs_store():
                    self._store.add("left", 1)
            elif self.count > 1:
                self._set(f"store/{self._attempt + 1}", END)
                deadline = time.monotonic() + DEAD_AFTER_SECONDS
                while self._store.add("left", 0) + len(self.dead) < self.count - 1 and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
        finally:
            self._closing.set()


def _serve(port: int) -> dist.TCPStore:
    """A store on this machine, for all who reach the port; 0: a free one. `PhaseFailed` if the port is taken."""
    try:
        return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise PhaseFailed(
            f"cannot listen on port {port} for the other nodes: {error}; set MASTER_PORT to the first of two free "
            "ports, or unset it to have them chosen"
        ) from error


def _connect(address: str, port: int, id: str) -> dist.TCPStore:
    """The store of the start with this id. OSError if nobody or another start answers there.

    From a thread of its own, because torch waits without limit for the answer of whoever listens at the address.
    """
    found: list[dist.TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            limit = timedelta(seconds=CONNECT_SECONDS)
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
            if store.check(["id"]) and store.get("id").decode() == id:
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
