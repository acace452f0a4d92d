"""Runs verifiers in separate processes, so that no response can crash the process that generates or make it wait.

That process, the client, submits responses, goes on, and collects the verdicts later. Before it starts threads or CUDA
it forks one process, the supervisor, which builds the verifier, forks workers that score one response at a time, and
replaces those that exceed a limit. Limits hold inside C code, too, which a hostile formula can keep busy for hours. A
forked process ends with the one that forked it, at the latest when its socket closes.

A verdict depends only on the response. So the time limit counts CPU time, which does not depend on the machine's load,
and if a worker ends for another reason, such as a kill, the response that it was scoring is scored again. Pools of
libraries, such as pebble's, limit wall time and fork workers from a process with threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import psutil

from megarl.data.prompts import Prompt
from megarl.errors import STOP_SIGNALS, UserError
from megarl.heartbeats import beat
from megarl.linux import fork, name_process, state_of
from megarl.recipe.tables import Recipe
from megarl.rewards import GroupVerifier, NoAnswer, Score, Verifier, VerifierUnavailable
from megarl.rewards.code import BUDGET

LENGTH = struct.Struct("!I")  # of a message, in front of it, as `Connection` writes it
RAISED: dict[str, type[Exception]] = {"mistake": UserError, "unavailable": VerifierUnavailable, "error": RuntimeError}
POLL_SECONDS = 0.5  # between two checks of workers that send nothing
SLOWER = 10  # how many times as long as its processor time a response may take on a busy machine
ATTEMPTS = 2  # times that a response is scored if its worker is killed from outside
# numbers of the responses, the pickled prompt, and the response, or all responses of a group
Question = tuple[range, bytes, str | tuple[str, ...]]


@dataclass(frozen=True)
class Limits:
    """Limits on scoring one response, and the number of workers."""

    seconds: float = 5.0  # CPU time
    memory: int = 4 << 30  # bytes in addition to those of a new worker; evaluating 10**10**10 would take all memory
    # a worker that scores but neither gets CPU time nor waits for it for so many seconds is replaced: it was stopped
    patience: float = 60.0
    workers: int = 4  # the most workers, which are forked for their first questions
    # for so many seconds after the last verdict scoring counts as progress, so that its phase does not seem to stall
    progress: float = 0.0

    @classmethod
    def of_this_process(cls, recipe: Recipe) -> Limits:
        """Limits for this process's share of its node's cores, with a patience well below ``run.stall_seconds``.

        Workers that wait for a service need no core, and may wait as long as its requests take.
        """
        stall_seconds = recipe.run.stall_seconds
        if service := recipe.reward.service:
            return cls(workers=service.at_once, patience=stall_seconds)
        replicas = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = max(1, min(cls.workers, len(os.sched_getaffinity(0)) // replicas))
        progress = SLOWER * BUDGET * recipe.reward.seconds if recipe.reward.kind == "code" else 0.0
        return cls(workers=workers, patience=min(cls.patience, stall_seconds / 4), progress=progress)


class VerifierPool:
    """The client's side. Construct it before the process starts threads or initialises CUDA, since it forks.

    ``build`` makes the verifier, in the supervisor. `verdicts` raises any `UserError` that it or the verifier raises.
    """

    def __init__(self, build: Callable[[], Verifier], limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._pid = fork()
        if not self._pid:
            _in_fork(theirs, lambda: _supervise(theirs, build, limits))
        theirs.close()
        self._supervisor = Connection(ours.detach())
        self._unsent: list[Question] = []
        self._asked = self._answered = 0  # responses submitted and scored
        self._progress, self._latest = limits.progress, 0.0  # latest: when questions or verdicts were last sent
        self._prompt: tuple[Prompt, bytes] | None = None  # the last prompt submitted, and its pickled form

    def ask(self, prompt: Prompt, responses: str | tuple[str, ...]) -> range:
        """Submit a response, or all responses to a prompt for a `GroupVerifier`; returns their numbers at once.

        They are sent by the next call of `verdicts`: together, since a call of the system for each would take longer
        than scoring short responses. The limits hold for a group as a whole.
        """
        if self._prompt is None or self._prompt[0] is not prompt:
            # without tokens: they may be most of a prompt, and no verifier reads them
            self._prompt = prompt, pickle.dumps(replace(prompt, tokens=()))
        numbers = range(self._asked, self._asked + (1 if isinstance(responses, str) else len(responses)))
        self._asked = numbers.stop
        self._unsent.append((numbers, self._prompt[1], responses))
        return numbers

    def verdicts(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> list[tuple[int, Score]]:
        """(number of the response, score) of all responses scored since the last call, in any order.

        A response that exceeded a limit of the pool has the score 0 and names it: "time", "memory", "stuck" or "died".
        wait: if responses are still being scored, wait until there is a verdict or ``unless()`` is true, and show
        heartbeats meanwhile, until `Limits.progress`.
        """
        if self._asked == self._answered:
            return []
        if self._unsent:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # why it has ended can still be read
                self._supervisor.send(self._unsent)
            self._unsent, self._latest = [], time.monotonic()
        while not (answers := self._receive()) and wait and not unless():
            self._supervisor.poll(POLL_SECONDS)
            if time.monotonic() - self._latest < self._progress:
                beat("scoring")
        if answers:
            self._answered, self._latest = self._answered + len(answers), time.monotonic()
            if wait:
                beat("scoring")
        return answers

    def _receive(self) -> list[tuple[int, Score]]:
        answers: list[tuple[int, Score]] = []
        try:
            while self._supervisor.poll():
                for number, answer in json.loads(self._supervisor.recv_bytes()):
                    for kind in answer.keys() & RAISED:
                        raise RAISED[kind](answer[kind])
                    answers.append((number, Score(**answer)))
        except (EOFError, ConnectionResetError):
            raise RuntimeError(
                "the process that supervises the verifiers ended; if it printed an error, it is above in this log"
            ) from None
        return answers

    def close(self) -> None:
        """End all processes of the pool, and wait for them."""
        if self._pid:
            self._supervisor.close()
            os.waitpid(self._pid, 0)
            self._pid = 0


def _supervise(end: socket.socket, build: Callable[[], Verifier], limits: Limits) -> None:
    """In the supervisor: run until the client closes its socket or ends, or tell it why there is no verifier."""
    os.nice(19)  # score only with CPU time that the generation leaves, and with all of it once that has ended
    try:
        verifier = build()
    except UserError as error:
        failed = {"mistake": str(error)}
    except BaseException:
        failed = {"error": f"the verifier failed:\n{traceback.format_exc()}"}
    else:
        asyncio.run(_distribute(end, verifier, limits))
        return
    Connection(end.detach()).send_bytes(_answers(range(1), [failed]))


async def _distribute(end: socket.socket, verifier: Verifier, limits: Limits) -> None:
    """Pass the client's questions on to workers."""
    reader, client = await asyncio.open_connection(sock=end)
    waiting: asyncio.Queue[Question] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        workers = [_Worker(verifier, limits, waiting, client) for _ in range(limits.workers)]
        tasks = [group.create_task(worker.run()) for worker in workers]
        while (message := await _receive(reader)) is not None:
            for question in pickle.loads(message):
                waiting.put_nowait(question)
        for task in tasks:
            task.cancel()


async def _receive(reader: asyncio.StreamReader) -> bytes | None:
    """The next message that a `Connection` sent; None once it is closed."""
    try:
        return await reader.readexactly(*LENGTH.unpack(await reader.readexactly(LENGTH.size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a message to a `Connection`, once that reads it."""
    writer.write(LENGTH.pack(len(message)) + message)


@dataclass
class _Worker:
    """The supervisor's view of a worker process, forked for its first question, and of those that replace it."""

    verifier: Verifier
    limits: Limits
    waiting: asyncio.Queue[Question]
    client: asyncio.StreamWriter
    pid: int = 0  # 0: there is no process

    async def run(self) -> None:
        """Send the verdicts on one waiting question after another to the client."""
        try:
            while True:
                _send(self.client, await self._score(await self.waiting.get()))
        finally:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    async def _score(self, question: Question) -> bytes:
        """The answers to a question, which is asked again if the process left before it or was killed: by a person, the
        kernel or `_ask`."""
        for _ in range(ATTEMPTS):
            if not self.pid:
                await self._fork()
            answers, stuck = await self._ask(question)
            if answers is not None:
                return answers
            self.writer.close()
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            if code not in (0, -signal.SIGKILL):
                break  # for example C code without memory or stack
        over = "stuck" if stuck else "time" if code == -signal.SIGPROF else "died"
        return _answers(question[0], [asdict(Score(0.0, over))])

    async def _ask(self, question: Question) -> tuple[bytes | None, bool]:
        """The process's answers, None if it has ended; and whether it was killed because it was stuck."""
        ran, seen, stuck = self._processor_time(), time.monotonic(), False  # seen: when it was last known to run
        _send(self.writer, pickle.dumps(question))
        answers = asyncio.ensure_future(_receive(self.reader))
        while not (await asyncio.wait([answers], timeout=POLL_SECONDS))[0]:
            now, before = time.monotonic(), ran
            if now - seen > self.limits.patience and not stuck:
                ran, seen = self._processor_time(), now
                if stuck := ran == before and state_of(self.pid) != "R":  # nor does it wait for a CPU
                    os.kill(self.pid, signal.SIGKILL)
        return answers.result(), stuck

    def _processor_time(self) -> int:
        """Nanoseconds for which the process ran; 0 once it has ended."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/schedstat") as file:
            return int(file.read().split()[0])
        return 0

    async def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = fork()
        if not self.pid:
            _in_fork(theirs, lambda: _work(theirs, self.verifier, self.limits))
        theirs.close()
        self.reader, self.writer = await asyncio.open_connection(sock=ours)


def _answers(numbers: range, found: list[dict[str, Any]]) -> bytes:
    """The message with the answer to each response of a question; a single answer holds for all of them.

    No pickle: a response may have taken over its worker.
    """
    return json.dumps([*zip(numbers, found * len(numbers) if len(found) == 1 else found, strict=True)]).encode()


def _in_fork(end: socket.socket, run: Callable[[], None]) -> NoReturn:
    """In a forked child: close all files but ``end`` and the standard streams, call ``run``, and exit."""
    code = 1
    try:
        name_process("verifier")
        for number in STOP_SIGNALS:  # a scheduler sends them to all processes, but the client still needs this one
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, end.fileno())
        os.closerange(end.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)  # skip cleanup: the inherited resources belong to the parent


def _work(end: socket.socket, verifier: Verifier, limits: Limits) -> None:
    """In a worker: score one response after another. Ends early if one left too much memory in use or exceeded it."""
    logging.disable(logging.CRITICAL)  # math-verify logs every formula that it cannot read
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel should kill this process first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process = psutil.Process()
    begin = process.memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (begin + limits.memory,) * 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process, also inside C code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    worn, supervisor = False, Connection(end.detach())
    with contextlib.suppress(EOFError):
        while not worn:
            numbers, prompt, responses = supervisor.recv()
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            found = _score(verifier, pickle.loads(prompt), responses)
            signal.setitimer(signal.ITIMER_PROF, 0)
            # memory that this response left in use must not count against the next one
            worn = found[0].get("over") == "memory" or process.memory_info().vms - begin > limits.memory // 8
            supervisor.send_bytes(_answers(numbers, found))


def _score(verifier: Verifier, prompt: Prompt, responses: str | tuple[str, ...]) -> list[dict[str, Any]]:
    """The answer to each response of a question; a single one if it is the same for all."""
    random.seed(0)
    if "sympy.core.random" in sys.modules:  # SymPy tests equality at random points
        sys.modules["sympy.core.random"].seed(0)
    try:
        if isinstance(responses, str):
            found = verifier.score(prompt, responses)
            return [asdict(found if isinstance(found, Score) else Score(found))]
        return [asdict(score) for score in cast(GroupVerifier, verifier).score_group(prompt, responses)]
    except MemoryError:
        return [asdict(Score(0.0, "memory"))]
    except UserError as error:
        if isinstance(error, NoAnswer) and "exam" in prompt.entry:
            return [asdict(Score(0.0))]
        return [{"mistake": str(error)}]
    except VerifierUnavailable as error:
        return [{"unavailable": str(error)}]
    except Exception:
        text = responses if isinstance(responses, str) else responses[0]
        where = f"on prompt {prompt.text[:60]!r} with response {text[:60]!r}"
        return [{"error": f"the verifier failed:\n{where}:\n{traceback.format_exc()}"}]
