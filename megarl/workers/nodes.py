"""The node agents of a run: one process per node, which meet in a store of torch (TCPStore) on the first node.

The first agent decides which phase is next. In the store each agent has one JSON value, which a thread exchanges: a
count as its heartbeat, the attempt at a phase that it makes, and how it ended there. When an attempt fails on a node,
or an agent falls silent, all others kill their processes at once. The only node of a run listens nowhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch.distributed as dist

from megarl.errors import PhaseFailed, UserError
from megarl.storage.files import APPEAR_SECONDS, make_directory, write_atomic
from megarl.workers.node_rank import NodeRank
from megarl.workers.processes import POLL_SECONDS, STALLED, STOPPED, Starter

HEARTBEAT_SECONDS = 0.1
DEAD_AFTER_SECONDS = 15.0  # without a heartbeat; less than Slurm's KillWait, so the cause is logged before a job dies
LEADER_LOST_SECONDS = 60.0  # without an answer of the store: more than a busy machine or network needs
CAUSE_CHARACTERS = 20_000  # of a report; a value of torch's store has 8 MiB at most
# file of the run directory, and key of the store, with a word that the first agent chooses: an agent whose files have
# another word belongs to another start or run, or does not share the run directory
WORD = ".agents"
JOIN_SECONDS = 600.0  # nodes of one job start seconds apart, but may have to pull a container first

Outcome = Literal["done", "failed", "stopped", "aborted"]


@dataclass(frozen=True)
class Report:
    """How an attempt at a phase ended on one node. ``aborted``: it was killed because another node failed."""

    outcome: Outcome
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

    def __init__(self, node: NodeRank, starter: Starter | None = None, run_dir: Path = Path()) -> None:
        """Join the other agents; `PhaseFailed` if they do not within `JOIN_SECONDS`.

        run_dir: needed with several nodes, which must share it; it may not exist yet.
        """
        self.starter = starter or Starter()
        self.rank, self.count, self._node = node.rank, node.count, node
        self._said: dict[str, Any] = {"attempt": 0, "report": None, "host": socket.gethostname()}
        self._heard: dict[int, dict[str, Any]] = {}  # what other agents said last: the first any, others the first
        self._others = tuple(range(1, self.count)) if self.rank == 0 else (0,)
        self._of_phase: dist.TCPStore | None = None  # the store for the processes of the current attempt
        self.phase_store = f"{node.address}:{node.port + 1}" if node.count > 1 else ""  # where these find it
        self.dead: dict[int, Report] = {}  # of agents that fell silent, by rank; only the first agent notices
        self._silent = 0.0  # seconds since the first agent's last heartbeat, counted where the main thread waits
        self._closing = threading.Event()
        self._stranger = False  # whether the first agent is another run's, or has another run directory
        if self.count > 1:
            agents = None
            if self.rank == 0:
                make_directory(run_dir)
                store, word = _serve(node.port), secrets.token_hex()
                write_atomic(run_dir / WORD, word)
                store.set(WORD, word)
                agents = dist.PrefixStore(word, store)
            self._thread = threading.Thread(target=self._exchange, args=(run_dir, agents), daemon=True)
            self._thread.start()
            self._join()

    def _join(self) -> None:
        start = time.monotonic()
        while missing := [rank for rank in self._others if rank not in self._heard]:
            if self._stranger:
                self._closing.set()
                raise UserError(
                    f"{self.name()}: the run directory must lie on a file system that all nodes share, but it is not "
                    f"that of the first node, {self._node.address}:{self._node.port}; or another run uses this port"
                )
            if time.monotonic() - start > JOIN_SECONDS:
                self._closing.set()
                raise PhaseFailed(
                    f"node {missing[0]} of {self.count} did not join at {self._node.address}:{self._node.port} within "
                    f"{JOIN_SECONDS:.0f} s: see its output. All need the same MASTER_ADDR and MASTER_PORT, or one "
                    "Slurm job, a rank of their own, and a run directory that they share"
                )
            time.sleep(POLL_SECONDS)

    def name(self) -> str:
        """The name of this node for messages: rank and host name."""
        return f"node {self.rank} ({self._said['host']})"

    # --- attempts at phases ---

    def begin(self, start: dict[str, Any]) -> None:
        """First agent: begin an attempt at a phase, of which ``start`` tells the others.

        With several nodes the processes get a store of their own, since torch writes keys there, such as the report of
        an NCCL error, that the processes of the next attempt must not see.
        """
        if self.count > 1:
            self._of_phase = None  # closes it: the next one has the same port
            self._of_phase = _serve(self._node.port + 1)
        self._say(attempt=self._said["attempt"] + 1, start=start, report=None)

    def meet(self) -> dict[str, Any] | None:
        """Others: wait until the first agent begins an attempt; its ``start``, or None if it ends the run instead."""
        attempt = self._said["attempt"] + 1
        self._wait(lambda: self._heard[0]["attempt"] == attempt or self._heard[0]["left"])
        self._say(attempt=attempt, report=None)
        first = self._heard[0]
        return first["start"] if first["attempt"] == attempt else None

    def check_end(self) -> None:
        """Others, after `meet` has returned None: raise if the first agent ended the run with an error or a stop."""
        end = self._heard[0]["report"] or {"outcome": "done"}
        if end["outcome"] == "stopped":
            raise KeyboardInterrupt
        if end["outcome"] != "done":
            raise (UserError if end["mistake"] else PhaseFailed)("the run failed: see the output of node 0")

    def report(self, report: Report) -> None:
        """Say how the attempt ended here; unless it is done, all nodes abort it."""
        cause, half = report.cause, CAUSE_CHARACTERS // 2
        if len(cause) > CAUSE_CHARACTERS:
            cause = f"{cause[:half]}\n...\n{cause[-half:]}"
        self._say(report=asdict(replace(report, cause=cause)))

    def reports(self) -> dict[int, Report]:
        """First agent: wait until the attempt has ended on all nodes, {rank: report}; an agent that died has failed."""
        self._wait(lambda: len(self._reported()) == self.count)
        return self._reported()

    def _reported(self) -> dict[int, Report]:
        """First agent: what agents have reported of the current attempt, or when they left before it."""
        reports, mine = dict(self.dead), self._said
        for rank, said in [(0, mine), *list(self._heard.items())]:
            if said["report"] and (said["attempt"] == mine["attempt"] or said.get("left")):
                reports[rank] = Report(**said["report"])
        return reports

    def aborted(self) -> str:
        """Why this node must end the attempt: `STALLED`, `STOPPED` if others were told to stop, which leaves it its
        time to save, or "1" for any other reason; "" if it need not.

        Call it several times a second.
        """
        self._check_silence()
        return str(self._heard[0]["abort"]) if self.rank else self._abort()

    def _abort(self) -> str:
        bad = [report for report in self._reported().values() if report.outcome != "done"]
        if any(report.stalled for report in bad):
            return STALLED
        if bad and all(report.outcome == "stopped" for report in bad):
            return STOPPED
        return "1" if bad or self._closing.is_set() else ""

    # --- the exchange ---

    def _say(self, **values: Any) -> None:
        self._said = {**self._said, **values}

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(POLL_SECONDS)
            self._check_silence()

    def _check_silence(self) -> None:
        """Every `POLL_SECONDS`. Calls are counted, so that no time passes while the whole process is suspended."""
        self._silent += POLL_SECONDS
        if self.rank and self._silent > LEADER_LOST_SECONDS:
            self._lose_first(f"no heartbeat for {LEADER_LOST_SECONDS:.0f} s")

    def _lose_first(self, cause: str) -> NoReturn:
        hint = "it died, was stopped or hangs; see that node's output"
        self._end(f"megarl: {self.name()} lost the agent of node 0: {hint} ({cause})\n")

    def _end(self, message: str) -> NoReturn:
        """End this agent at once, and with it its processes: whatever it does, the main thread may hang."""
        with contextlib.suppress(OSError):  # nobody may read it any more
            os.write(2, message.encode())
        os._exit(1)

    def _exchange(self, run_dir: Path, agents: dist.Store | None) -> None:
        """Thread: say what this agent has to say, hear the others, and notice when their heartbeats stop.

        The first agent leaves last, since the store ends with it.
        """
        try:
            agents = agents or self._connect(run_dir / WORD)
            quiet = dict.fromkeys(self._others, 0)  # rank -> rounds since its last heartbeat
            for beat in itertools.count():
                time.sleep(HEARTBEAT_SECONDS)
                left = self._closing.is_set()
                # in this order, since the main thread may begin another attempt in between
                said = {**self._said, "abort": self._abort(), "left": left, "beat": beat}
                agents.set(str(self.rank), json.dumps(said))
                others = [rank for rank in self._others if rank not in self.dead]
                if left and (self.rank or all(self._heard[rank]["left"] for rank in others if rank in self._heard)):
                    return
                for rank in others:
                    if agents.check([str(rank)]):
                        self._hear(rank, json.loads(agents.get(str(rank))), quiet)
        except Exception as error:
            if self._closing.is_set():
                return
            if self.rank and isinstance(error, RuntimeError):  # torch's, without an answer of the store
                self._lose_first(repr(error))
            self._end(traceback.format_exc())  # without this thread the run would wait for ever

    def _hear(self, rank: int, said: dict[str, Any], quiet: dict[int, int]) -> None:
        if said != self._heard.get(rank):
            self._heard[rank], self._silent, quiet[rank] = said, 0.0, 0
        quiet[rank] += 1
        if self.rank == 0 and quiet[rank] * HEARTBEAT_SECONDS > DEAD_AFTER_SECONDS:
            cause = f"the agent of node {rank} ({said['host']}) died or hangs: no heartbeat for"
            self.dead[rank] = Report("failed", f"{cause} {DEAD_AFTER_SECONDS:.0f} s", primary=True)

    def _connect(self, file: Path) -> dist.Store:
        """Others: join the first agent, waiting until it is there. file: `WORD` of the run directory.

        The agents of an earlier start, which may still listen there, are told apart: they have another word, or their
        first one has left, or their agent of this rank has joined.
        """
        place, patience = (self._node.address, self._node.port), timedelta(seconds=JOIN_SECONDS)
        differs = math.inf  # since when the word is another one
        while not self._closing.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(RuntimeError):  # nobody listened for so long, or the store that did has ended
                store = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=patience)
                if not store.check([WORD]):
                    continue
                word = store.get(WORD).decode()
                if not file.exists() or file.read_text() != word:
                    differs = min(differs, time.monotonic())
                    self._stranger = time.monotonic() - differs > APPEAR_SECONDS
                    continue
                differs, agents = math.inf, dist.PrefixStore(word, store)
                if not agents.check(["0"]):
                    continue
                first = json.loads(agents.get("0"))
                if not first["left"] and agents.add(f"joined/{self.rank}", 1) == 1:
                    self._heard[0] = first
                    return agents
        raise SystemExit  # of this thread: the main thread has given up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Leave the run; with an ``error``, report it first."""
        if self.count > 1:
            if error is not None:
                outcome: Outcome = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                mistake = isinstance(error, UserError)
                self.report(Report(outcome, f"{self.name()}: {error!r}", mistake, time=time.time()))
            self._closing.set()
            self._thread.join(DEAD_AFTER_SECONDS)


def _serve(port: int) -> dist.TCPStore:
    """A store on this machine, for all who reach the port. `PhaseFailed` if the port is taken."""
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise PhaseFailed(
            f"cannot listen on port {port} for the other nodes: {error}; set MASTER_PORT on all nodes to the "
            "first of two free ports"
        ) from error
