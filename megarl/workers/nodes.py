"""The node agents of a run: one process per node, which meet in a store of torch (TCPStore) on the first node.

The first agent decides which phase is next and records it in events.jsonl, where the others find it.
In the store each agent keeps what it says (`Said`), as JSON under its rank. When an attempt at a phase
fails on a node, or the heartbeats of its agent stop, all others kill their processes at once.
The only node of a run listens nowhere.

Only a thread waits for the store, so that whatever happens to the network,
the main thread notices the end of its processes and a request to stop.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Literal, Self

import torch.distributed as dist

from megarl.errors import PhaseFailed
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import POLL_SECONDS, STALLED, Starter

HEARTBEAT_SECONDS = 0.1
DEAD_AFTER_SECONDS = 15.0  # without a heartbeat; less than Slurm's KillWait, so the cause is logged before a job dies
LEADER_LOST_SECONDS = 60.0  # without an answer of the store: more than a busy machine or network needs
JOIN_SECONDS = 600.0  # nodes of one job start seconds apart, but may have to pull a container first
HANGS_SECONDS = 600.0  # without CPU time of the main thread; a healthy one polls


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


@dataclass(frozen=True)
class Said:
    """What an agent says to the others."""

    host: str = field(default_factory=socket.gethostname)
    beats: int = 0  # heartbeats
    attempt: int = 0  # at a phase, from 1
    report: Report | None = None  # how that ended
    left: bool = False  # the run ends with the first agent
    written: int = 0  # first agent: the bytes of events.jsonl that name the attempt
    abort: str = ""  # first agent: why all must end the attempt, `STALLED` or "1"

    @classmethod
    def parse(cls, text: bytes) -> Said:
        values = json.loads(text)
        report = values.pop("report")
        return cls(**values, report=report and Report(**report))


class Nodes:
    """This agent's connection to all agents of a run.

    At each attempt at a phase the first agent (rank 0) calls `begin`, the others `meet`; then each calls `report`, and
    the first one `reports`.
    """

    def __init__(self, node: NodeRank, starter: Starter | None = None) -> None:
        """Join the other agents; `PhaseFailed` if one does not within `JOIN_SECONDS`."""
        self.starter = starter or Starter()
        self.rank, self.count, self._node = node.rank, node.count, node
        self._place = f"{node.address}:{node.port}"
        # of the processes of an attempt; "" on the only node
        self.phase_store = f"{node.address}:{node.port + 1}" if node.count > 1 else ""
        self._of_phase: dist.TCPStore | None = None
        self._says = Said()  # the main thread replaces it
        self._heard: dict[int, Said] = {}  # the first agent hears all, the others the first
        self._beats = 0
        self._silent = 0  # checks since the last answer of the store
        self.dead: dict[int, str] = {}  # rank -> message about the agent's death
        self._closing = threading.Event()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._check, args=(clock,), daemon=True).start()
        self._others = range(1) if self.rank else range(1, self.count)
        self._store: dist.Store | None = None
        self._exchanging = threading.Thread(target=self._exchange, daemon=True)
        if self.count > 1:
            self._store = None if self.rank else _serve(node.port)
            self._exchanging.start()
            try:
                self._wait_for_others()
            except BaseException:
                self._closing.set()
                raise

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while missing := [rank for rank in self._others if rank not in self._heard]:
            self._require_first()
            if time.monotonic() > deadline and self.rank:
                self._lose_first(f"no answer for {JOIN_SECONDS:.0f} s")
            elif time.monotonic() > deadline:
                raise PhaseFailed(
                    f"node {missing[0]} of {self.count} did not join within {JOIN_SECONDS:.0f} s: see its output"
                )
            time.sleep(POLL_SECONDS)

    def name(self, rank: int | None = None) -> str:
        """Rank and host name of a node, by default this one."""
        said = self._says if rank in (None, self.rank) else self._heard[rank or 0]
        return f"node {self.rank if rank is None else rank} ({said.host})"

    def _require_first(self) -> None:
        if 0 in self.dead:
            raise PhaseFailed(self.dead[0])

    # --- attempts at phases ---

    def begin(self, written: int = 0) -> None:
        """First agent: begin an attempt at a phase, which the first ``written`` bytes of events.jsonl name already.

        With several nodes the processes get a store of their own: torch writes keys there,
        such as the report of an NCCL error, that the next attempt must not see.
        """
        if self.count > 1:
            self._of_phase = None  # closes it, for its port
            self._of_phase = _serve(self._node.port + 1)
        self._says = replace(self._says, attempt=self._says.attempt + 1, report=None, written=written)

    def meet(self) -> int | None:
        """Others: wait until the first agent begins an attempt; its ``written``, or None if it leaves."""
        while (first := self._heard[0]).attempt == self._says.attempt and not first.left:
            self._require_first()
            time.sleep(POLL_SECONDS)
        if first.left:
            return None
        self._says = replace(self._says, attempt=first.attempt, report=None)
        return first.written

    def report(self, report: Report) -> None:
        """Say how the attempt ended here. All abort it unless it is done."""
        self._says = replace(self._says, report=report)

    def reports(self) -> dict[int, Report]:
        """First agent: wait until the attempt has ended everywhere, {rank: report}."""
        while len(found := self._reports()) < self.count:
            time.sleep(POLL_SECONDS)
        return found

    def _reports(self) -> dict[int, Report]:
        attempt, said = self._says.attempt, {0: self._says} | self._heard
        found = {rank: Report("failed", cause, primary=True) for rank, cause in dict(self.dead).items()}
        return found | {
            rank: one.report for rank, one in said.items() if one.report and (one.left or one.attempt == attempt)
        }

    def aborted(self) -> str:
        """Why this node must end the attempt at once: `STALLED`, or "1" for any other reason; "" if it need not."""
        if self.rank:
            first = self._heard[0]
            return "1" if first.left or self.dead else first.abort * (first.attempt == self._says.attempt)
        bad = [report for report in self._reports().values() if report.outcome != "done"]
        return STALLED if any(report.stalled for report in bad) else "1" if bad else ""

    # --- threads ---

    def _check(self, clock: int) -> None:
        """Check that the main thread, whose CPU time ``clock`` shows, does not hang, and that the store answers.

        Time is counted in checks, so that it does not pass while the whole process is suspended.
        While the main thread hangs there are no heartbeats, so that this agent counts as dead.
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
            if self._heard and self._silent * HEARTBEAT_SECONDS > LEADER_LOST_SECONDS:
                self._lose_first()
            if self.rank and self.dead and idle > DEAD_AFTER_SECONDS:  # then the main thread cannot end the processes
                _end_at_once(f"megarl: {self.dead[0]}\n")

    def _exchange(self) -> None:
        """Tell the others what this agent says, and hear them, until it has left."""
        quiet: dict[int, int] = {}  # rank -> checks since its last heartbeat
        leaves = False
        try:
            store = self._store or _join(self._node)
            while not leaves:
                leaves = self._closing.wait(HEARTBEAT_SECONDS)
                says = replace(self._says, beats=self._beats, abort="" if self.rank else self.aborted())
                store.set(str(self.rank), json.dumps(asdict(says)))
                for rank in self._others:
                    if rank in self._heard or store.check([str(rank)]):
                        said, before = Said.parse(store.get(str(rank))), self._heard.get(rank)
                        quiet[rank] = quiet[rank] + 1 if before and before.beats == said.beats else 0
                        self._heard[rank] = said
                        self._note(rank, said, quiet[rank] * HEARTBEAT_SECONDS)
                self._silent = 0
        except PhaseFailed as error:
            self.dead[0] = str(error)
        except RuntimeError as error:
            self._lose_first(error)

    def _note(self, rank: int, said: Said, quiet: float) -> None:
        """Note whether another agent still takes part. quiet: seconds without a heartbeat."""
        name = f"the agent of {self.name(rank)}"
        if said.left and rank and not self._says.left:
            self.dead.setdefault(rank, f"{name} has left the run")
        elif quiet > DEAD_AFTER_SECONDS and not said.left:
            if self.rank:
                self._lose_first()
            self.dead.setdefault(rank, f"{name} died or hangs: no heartbeat for {DEAD_AFTER_SECONDS:.0f} s")

    def _lose_first(self, error: object = None) -> None:
        cause = "it died, was stopped or hangs; see that node's output for the cause"
        cause = f"{self.name()} lost the agent of node 0: {cause}"
        if not self._heard:
            cause = f"cannot reach node 0 at {self._place}: {error}; MASTER_ADDR, if set, must name the first node"
        self.dead.setdefault(0, cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Leave the run, because of an ``error`` or not.

        The first agent ends the run and waits until the others have left, since the store ends with it.
        """
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt)
            self.report(Report("stopped" if stopped else "failed", f"{self.name()}: {error!r}", time=time.time()))
        self._says, deadline = replace(self._says, left=True), time.monotonic() + DEAD_AFTER_SECONDS
        try:
            while self.rank == 0 and self._somebody_stays() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            self._closing.set()
            if self.count > 1 and 0 not in self.dead:
                self._exchanging.join(DEAD_AFTER_SECONDS)  # until it has told that this agent has left

    def _somebody_stays(self) -> bool:
        return any(not said.left and rank not in self.dead for rank, said in self._heard.items())


def _serve(port: int) -> dist.TCPStore:
    """A store on this machine, for all who reach the port. `PhaseFailed` if the port is taken."""
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise PhaseFailed(
            f"cannot listen on port {port} for the other nodes: {error}; set MASTER_PORT on all nodes to the first of "
            "two free ports"
        ) from error


def _join(node: NodeRank) -> dist.TCPStore:
    """The store of the first agent; RuntimeError if it is not there within `JOIN_SECONDS`."""
    limit = timedelta(seconds=JOIN_SECONDS)
    store = dist.TCPStore(node.address, node.port, is_master=False, wait_for_workers=False, timeout=limit)
    if store.add(f"joined/{node.rank}", 1) > 1:
        raise PhaseFailed(
            f"another agent of node {node.rank} has joined node 0 at {node.address}:{node.port}: "
            "an earlier start has not ended, or another run has the same MASTER_PORT"
        )
    return store


def _print_stacks(idle: float) -> None:
    text = (
        f"megarl: no progress for {idle:.0f} s: this node agent hangs, most often because a file system "
        "does not respond. It continues as soon as the file system does. Its stack:\n"
    )
    os.write(2, text.encode())  # bypasses the progress display, in which the thread may hang
    faulthandler.dump_traceback(2)


def _end_at_once(text: str) -> None:
    os.write(2, text.encode())
    os._exit(1)
