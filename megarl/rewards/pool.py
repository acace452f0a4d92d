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

import contextlib
import json
import logging
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
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


@dataclass(frozen=True)
class Limits:
    """Limits on scoring one response, and the number of workers."""

    seconds: float = 5.0  # CPU time
    memory: int = 4 << 30  # bytes in addition to those of a new worker; evaluating 10**10**10 would take all memory
    # a worker that scores but neither gets CPU time nor waits for it for so many seconds is replaced: it was stopped
    patience: float = 60.0
    workers: int = 4  # the most workers; one is forked only when a response would have to wait for the others
    # for so many seconds a response that is being scored counts as progress, so that its phase does not seem to stall
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


class Channel:
    """Sends and receives messages over a socket without ever blocking."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.setblocking(False)
        self.unsent, self._received = bytearray(), bytearray()
        self.closed = False  # whether the other end has closed the connection

    def queue(self, message: bytes) -> None:
        """Have a message sent by the next `send` or `flush`."""
        self.unsent += LENGTH.pack(len(message)) + message

    def send(self, message: bytes) -> None:
        self.queue(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of ``unsent`` as the socket accepts now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

    def receive(self) -> list[bytes]:
        """All messages that have arrived whole."""
        try:
            while data := self.socket.recv(1 << 20):
                self._received += data
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True
        messages, begin = [], LENGTH.size
        while begin <= len(self._received):
            end = begin + LENGTH.unpack_from(self._received, begin - LENGTH.size)[0]
            if end > len(self._received):
                break
            messages.append(bytes(self._received[begin:end]))
            begin = end + LENGTH.size
        del self._received[: begin - LENGTH.size]
        return messages


class VerifierPool:
    """The client's side. Construct it before the process starts threads or initialises CUDA, since it forks.

    ``build`` makes the verifier, in the supervisor. `verdicts` raises any `UserError` that it or the verifier raises.
    """

    def __init__(self, build: Callable[[], Verifier], limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._pid = fork()
        if not self._pid:
            _in_fork(theirs, lambda: _Supervisor(theirs, build, limits).serve())
        theirs.close()
        self._supervisor = Channel(ours)
        self._asked = self._answered = 0  # responses submitted and scored
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
        self._supervisor.queue(pickle.dumps((numbers, self._prompt[1], responses)))
        return numbers

    def verdicts(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> list[tuple[int, Score]]:
        """(number of the response, score) of all responses scored since the last call, in any order.

        A response that exceeded a limit of the pool has the score 0 and names it: "time", "memory", "stuck" or "died".
        wait: if responses are still being scored, wait until there is a verdict or ``unless()`` is true, and show
        heartbeats meanwhile (`Limits.progress`).
        """
        if self._asked == self._answered:
            return []
        while not (answers := self._receive(wait)) and wait and not unless():
            unsent = [self._supervisor.socket] if self._supervisor.unsent else []
            select.select([self._supervisor.socket], unsent, [], POLL_SECONDS)
        self._answered += len(answers)
        return answers

    def _receive(self, beats: bool) -> list[tuple[int, Score]]:
        self._supervisor.flush()
        answers, messages = [], self._supervisor.receive()
        if beats and messages:
            beat("scoring")
        for number, answer in [item for message in messages for item in json.loads(message)]:
            for kind in answer.keys() & RAISED:
                raise RAISED[kind](answer[kind])
            answers.append((number, Score(**answer)))
        if self._supervisor.closed:
            raise RuntimeError(
                "the process that supervises the verifiers ended; if it printed an error, it is above in this log"
            )
        return answers

    def close(self) -> None:
        """End all processes of the pool, and wait for them."""
        if self._pid:
            self._supervisor.socket.close()
            os.waitpid(self._pid, 0)
            self._pid = 0


@dataclass
class _Question:
    """A response, or a group of responses, to be scored."""

    numbers: range
    message: bytes  # as it is sent to a worker
    attempts: int = 0  # times that its worker ended while scoring it


@dataclass(eq=False)
class _Worker:
    """The supervisor's view of a worker process."""

    pid: int
    channel: Channel
    question: _Question | None = None  # that it is scoring
    leaves: bool = False  # whether it has said that it takes no more questions
    ran: int = 0  # nanoseconds of CPU time when it was last seen to run
    seen: float = 0.0  # when that was, by `time.monotonic`
    since: float = 0.0  # when it got its question

    def begin(self, question: _Question) -> None:
        self.question = question
        self.ran, self.seen, self.since = self._processor_time(), time.monotonic(), time.monotonic()
        self.channel.send(question.message)

    def is_stuck(self, patience: float) -> bool:
        """Whether it has a question but has got no CPU time for ``patience`` seconds, and does not wait for a CPU."""
        if not self.question or time.monotonic() - self.seen <= patience:
            return False
        if (ran := self._processor_time()) == self.ran and state_of(self.pid) != "R":
            return True
        self.ran, self.seen = ran, time.monotonic()
        return False

    def _processor_time(self) -> int:
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/schedstat") as file:
            return int(file.read().split()[0])
        return self.ran  # it has just ended


class _Supervisor:
    """Distributes the client's questions to workers, and forwards their verdicts to the client."""

    def __init__(self, client: socket.socket, build: Callable[[], Verifier], limits: Limits) -> None:
        self.client, self.limits = Channel(client), limits
        self.waiting: deque[_Question] = deque()
        self.workers: list[_Worker] = []
        self.reported = 0.0  # when `_report` last told the client something
        os.nice(19)  # score only with CPU time that the generation leaves, and with all of it once that has ended
        try:
            self.verifier = build()
        except UserError as error:
            self._end({"mistake": str(error)})
        except BaseException:
            self._end({"error": f"the verifier failed:\n{traceback.format_exc()}"})

    def serve(self) -> None:
        """Run until the client closes its socket or ends."""
        while not self.client.closed:
            self._select()
            for message in self.client.receive():
                self.waiting.append(_Question(pickle.loads(message)[0], message))
            self.workers = [worker for worker in self.workers if not self._ended(worker)]
            self._dispatch()
            self._report()
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)

    def _select(self) -> None:
        """Wait until a socket can be read, or written if it has unsent data; no longer than a poll if workers score."""
        channels = [self.client, *(worker.channel for worker in self.workers)]
        unsent = [channel.socket for channel in channels if channel.unsent]
        busy = any(worker.question for worker in self.workers)
        select.select([channel.socket for channel in channels], unsent, [], POLL_SECONDS if busy else None)
        for channel in channels:
            channel.flush()

    def _report(self) -> None:
        """Tell the client now and then, by a message without answers, that a response is being scored."""
        now = time.monotonic()
        if now - self.reported < POLL_SECONDS or self.client.unsent:
            return
        if any(worker.question and now - worker.since < self.limits.progress for worker in self.workers):
            self.client.send(b"[]")
            self.reported = now

    def _ended(self, worker: _Worker) -> bool:
        """Forward a worker's verdicts. If it has ended, or is stuck and is killed, requeue or answer its question."""
        for message in worker.channel.receive():
            if message:
                self.client.send(message)
                worker.question = None
            else:
                worker.leaves = True
        stuck = worker.is_stuck(self.limits.patience)
        if stuck:
            os.kill(worker.pid, signal.SIGKILL)
        elif not worker.channel.closed:
            return False
        _, status = os.waitpid(worker.pid, 0)
        worker.channel.socket.close()
        if question := worker.question:
            code = os.waitstatus_to_exitcode(status)
            question.attempts += 1
            if code == -signal.SIGKILL and question.attempts < ATTEMPTS:  # killed by a person, the kernel or above
                self.waiting.appendleft(question)
            else:  # died: for example C code without memory or stack, or `os._exit(0)` in the code of a reward
                over = "stuck" if stuck else "time" if code == -signal.SIGPROF else "died"
                self.client.send(_answers(question.numbers, [asdict(Score(0.0, over))]))
        return True

    def _dispatch(self) -> None:
        """Send waiting questions to idle workers, and fork new workers up to the limit."""
        idle = [worker for worker in self.workers if not worker.question and not worker.leaves]
        while self.waiting and (idle or len(self.workers) < self.limits.workers):
            (idle.pop() if idle else self._fork()).begin(self.waiting.popleft())

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = fork()
        if not pid:
            _in_fork(theirs, lambda: _work(theirs, self.verifier, self.limits))
        theirs.close()
        self.workers.append(_Worker(pid, Channel(ours)))
        return self.workers[-1]

    def _end(self, answer: dict[str, str]) -> NoReturn:
        """Tell the client why there is no verifier, and exit."""
        self.client.socket.setblocking(True)
        self.client.send(_answers(range(1), [answer]))
        sys.exit(1)


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
            if worn:
                supervisor.send_bytes(b"")  # it takes no more questions
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
