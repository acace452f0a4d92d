"""Verifiers in processes of their own: no response stops a generation, or keeps it waiting.

The process that generates asks and goes on; verdicts are there when it looks. It forks one process, the keeper, before
it starts threads or CUDA. The keeper builds the verifier, forks workers that score one response at a time, and ends
those that take too long, wherever they are: a hostile formula can keep C code busy for hours. Whatever is forked dies
with the process that forked it, by the end of its socket at the latest.

A verdict depends on the response alone. So the limit is one of processor time, which a busy machine does not change,
and a worker that ended for another reason, such as a kill, does not count against the response that it had.
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
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megarl.data.prompts import Prompt
from megarl.errors import STOP_SIGNALS, UserError
from megarl.linux import name_process
from megarl.rewards import Score, Verifier

HEADER = struct.Struct(">QI")  # number of the question, bytes that follow
POLL_SECONDS = 0.5  # between two looks at workers that say nothing
ATTEMPTS = 2  # of a response whose worker ended, but not because of the limits


@dataclass(frozen=True)
class Limits:
    """Of one response, and of all."""

    seconds: float = 5.0  # processor time
    memory: int = 4 << 30  # bytes beyond those of a worker that has scored nothing; 10**10**10 would take all there are
    patience: float = 60.0  # seconds in which a worker that scores must run at all: else somebody has stopped it
    workers: int = 4  # at most; another one is forked when a response would wait for those there are

    @classmethod
    def of_this_process(cls, stall_seconds: float) -> Limits:
        """With this process's share of its node's cores; a worker is replaced before the phase seems to stand still."""
        replicas = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = max(1, min(cls.workers, len(os.sched_getaffinity(0)) // replicas))
        return cls(workers=workers, patience=min(cls.patience, stall_seconds / 4))


@dataclass(frozen=True)
class Verdict:
    """What a response is worth, in [0, 1]; ``over`` says which limit it exceeded, which makes the score 0."""

    score: float
    over: str | None = None  # "time" | "memory" | "died", or a limit of the verifier's own
    reward: float | None = None  # as in `Score`
    extra: float = 0.0

    @property
    def found(self) -> Score:
        """What it says of the reward."""
        return Score(self.score, self.over, self.reward, self.extra)


def _verdict(answer: dict[str, Any]) -> Verdict:
    return Verdict(answer["score"], answer.get("over"), answer.get("reward"), answer.get("extra", 0.0))


class VerifierPool:
    """To be made before this process starts threads or initialises CUDA, which its fork could not use.

    ``build`` makes the verifier, in the keeper. A `UserError` that it or the verifier raises is raised by `verdicts`.
    """

    def __init__(self, build: Callable[[], Verifier], limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            _in_fork(theirs, lambda: _Keeper(theirs, build, limits).serve())
        theirs.close()
        self._keeper = _Channel(ours)
        self._asked = self._answered = 0

    def ask(self, prompt: Prompt, response: str) -> int:
        """Have a response scored; returns at once, with the number of the question."""
        self._asked += 1
        # tokens, which no verifier reads, may be most of a prompt
        self._keeper.send(self._asked, pickle.dumps((replace(prompt, tokens=()), response)))
        return self._asked

    def verdicts(self, wait: bool = False) -> list[tuple[int, Verdict]]:
        """(number of the question, verdict) of what has been scored since the last call, in any order.

        wait: until there is one, if there are questions without an answer.
        """
        if self._asked == self._answered:
            return []
        while not (answers := self._receive()) and wait:
            select.select([self._keeper.socket], [self._keeper.socket] if self._keeper.unsent else [], [])
        self._answered += len(answers)
        return answers

    def _receive(self) -> list[tuple[int, Verdict]]:
        self._keeper.flush()
        answers = []
        for number, body in self._keeper.receive():
            answer = json.loads(body)
            if "mistake" in answer:
                raise UserError(answer["mistake"])
            if "error" in answer:
                raise RuntimeError(f"the verifier failed:\n{answer['error']}")
            answers.append((number, _verdict(answer)))
        if self._keeper.closed:
            raise RuntimeError("the process that keeps the verifiers ended; its own message is above, if it had one")
        return answers

    def close(self) -> None:
        """End all processes, and wait for them."""
        if self._pid:
            self._keeper.socket.close()
            os.waitpid(self._pid, 0)
            self._pid = 0


class _Channel:
    """Numbered messages both ways over a socket, neither of which ever waits."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.setblocking(False)
        self.unsent, self._received = bytearray(), bytearray()
        self.closed = False  # by the other end

    def send(self, number: int, body: bytes) -> None:
        self.unsent += HEADER.pack(number, len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

    def receive(self) -> list[tuple[int, bytes]]:
        """All messages that have arrived."""
        try:
            while data := self.socket.recv(1 << 20):
                self._received += data
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True
        messages = []
        while len(self._received) >= HEADER.size:
            number, size = HEADER.unpack_from(self._received)
            if len(self._received) < HEADER.size + size:
                break
            messages.append((number, bytes(self._received[HEADER.size : HEADER.size + size])))
            del self._received[: HEADER.size + size]
        return messages


@dataclass
class _Question:
    number: int
    body: bytes
    attempts: int = 0


@dataclass
class _Worker:
    pid: int
    channel: _Channel
    question: _Question | None = None
    ran: int = 0  # nanoseconds of processor time when it was last seen to run
    seen: float = 0.0  # when that was, `time.monotonic`
    ended: bool = False

    def begin(self, question: _Question) -> None:
        self.question, self.ran, self.seen = question, self._processor_time(), time.monotonic()
        self.channel.send(question.number, question.body)

    def is_stuck(self, patience: float) -> bool:
        """Whether it has not run at all for so many seconds, though it has a question."""
        if not self.question or time.monotonic() - self.seen <= patience:
            return False
        if (ran := self._processor_time()) == self.ran:
            return True
        self.ran, self.seen = ran, time.monotonic()
        return False

    def _processor_time(self) -> int:
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/schedstat") as file:
            return int(file.read().split()[0])
        return self.ran  # it has just ended


class _Keeper:
    """Hands questions to workers, and verdicts back."""

    def __init__(self, asker: socket.socket, build: Callable[[], Verifier], limits: Limits) -> None:
        self.asker, self.limits = _Channel(asker), limits
        self.waiting: deque[_Question] = deque()
        self.workers: list[_Worker] = []
        os.nice(19)  # scoring takes only time that the generation leaves; what is left at its end has all of it
        try:
            self.verifier = build()
        except UserError as error:
            self._end({"mistake": str(error)})
        except BaseException:
            self._end({"error": traceback.format_exc()})

    def serve(self) -> None:
        """Until the asker is gone."""
        while not self.asker.closed:
            self._select()
            self.waiting += [_Question(number, body) for number, body in self.asker.receive()]
            for worker in self.workers:
                self._hear(worker)
            self.workers = [worker for worker in self.workers if not worker.ended]
            self._hand_out()
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)

    def _select(self) -> None:
        channels = [self.asker, *(worker.channel for worker in self.workers)]
        unsent = [channel.socket for channel in channels if channel.unsent]
        busy = any(worker.question for worker in self.workers)
        select.select([channel.socket for channel in channels], unsent, [], POLL_SECONDS if busy else None)
        for channel in channels:
            channel.flush()

    def _hear(self, worker: _Worker) -> None:
        """Take a worker's verdict, notice its end, or end it."""
        for number, body in worker.channel.receive():
            self.asker.send(number, body)
            worker.question = None
        if worker.is_stuck(self.limits.patience):
            os.kill(worker.pid, signal.SIGKILL)
        elif not worker.channel.closed:
            return
        _, status = os.waitpid(worker.pid, 0)
        worker.channel.socket.close()
        worker.ended = True
        if worker.question:
            self._after_its_worker(worker.question, os.waitstatus_to_exitcode(status))

    def _after_its_worker(self, question: _Question, code: int) -> None:
        question.attempts += code != 0  # else it ended because of the response before
        if code in (0, -signal.SIGKILL) and question.attempts < ATTEMPTS:  # by a person, the kernel, or `_hear`
            self.waiting.appendleft(question)
            return
        over = "time" if code == -signal.SIGPROF else "died"  # as C code does that gets no memory, or recurs too deep
        self.asker.send(question.number, json.dumps({"score": 0.0, "over": over}).encode())

    def _hand_out(self) -> None:
        idle = [worker for worker in self.workers if not worker.question]
        while self.waiting and (idle or len(self.workers) < self.limits.workers):
            worker = idle.pop() if idle else self._fork()
            worker.begin(self.waiting.popleft())

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            _in_fork(theirs, lambda: _work(theirs, self.verifier, self.limits))
        theirs.close()
        self.workers.append(_Worker(pid, _Channel(ours)))
        return self.workers[-1]

    def _end(self, answer: dict[str, str]) -> NoReturn:
        self.asker.socket.setblocking(True)
        self.asker.send(0, json.dumps(answer).encode())
        sys.exit(1)


def _in_fork(end: socket.socket, run: Callable[[], None]) -> NoReturn:
    """Run in a fork that keeps no file but ``end`` and what it prints to, then end it."""
    code = 1
    try:
        name_process("verifier")
        for number in STOP_SIGNALS:  # a scheduler sends them to all processes, but the asker still needs this one
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
        os._exit(code)  # what it inherited is not its to clean up


def _work(keeper: socket.socket, verifier: Verifier, limits: Limits) -> None:
    """In a worker: score one response after another."""
    logging.disable(logging.CRITICAL)  # math-verify logs every formula that it cannot read
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory is short, the kernel is to take this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (begin + limits.memory,) * 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process, also inside C code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    keeper.setblocking(True)
    with keeper.makefile("rb") as questions:
        while header := questions.read(HEADER.size):
            number, size = HEADER.unpack(header)
            prompt, response = pickle.loads(questions.read(size))
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            answer = _score(verifier, prompt, response)
            signal.setitimer(signal.ITIMER_PROF, 0)
            body = json.dumps(answer).encode()
            keeper.sendall(HEADER.pack(number, len(body)) + body)
            if answer.get("over") or _memory() - begin > limits.memory // 8:
                return  # what this response left behind is not to count against the next one


def _score(verifier: Verifier, prompt: Prompt, response: str) -> dict[str, Any]:
    random.seed(0)
    if "sympy.core.random" in sys.modules:  # it tests equality at random points
        sys.modules["sympy.core.random"].seed(0)
    try:
        found = verifier.score(prompt, response)
        if not isinstance(found, Score):
            return {"score": found}
        return {"score": found.value, "over": found.over, "reward": found.reward, "extra": found.extra}
    except MemoryError:
        return {"score": 0.0, "over": "memory"}
    except UserError as error:
        return {"mistake": str(error)}
    except Exception:
        return {"error": f"{prompt.text[:60]!r}, answered by {response[:60]!r}:\n{traceback.format_exc()}"}


def _memory() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
