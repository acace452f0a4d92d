"""Verifiers in processes of their own: no response stops a generation, or keeps it waiting.

The process that generates asks and goes on; verdicts are there when it looks. It forks one process, the keeper, before
it starts threads or CUDA. The keeper builds the verifier, forks workers that score one response at a time, and ends
those that take too long, wherever they are: a hostile formula can keep C code busy for hours. Whatever is forked dies
with the process that forked it, by the end of its socket at the latest. Responses travel in batches, because a word
compared takes less time than a message.

A verdict depends on the response alone. So the limit is one of processor time, which a busy machine does not change,
and a worker that ended for another reason, such as a kill, does not count against the response that it had.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

from megarl.data.prompts import Prompt
from megarl.errors import STOP_SIGNALS, UserError
from megarl.linux import name_process
from megarl.recipe.tables import Recipe
from megarl.rewards import GroupVerifier, Score, Verifier, VerifierUnavailable
from megarl.rewards.messages import MESSAGE, Channel, pack_answers, pack_question, split, unpack_question

NUMBER = struct.Struct("=Q")
BATCH = 32  # questions in a message, at most
SECONDS_TO_ANSWER = 0.01  # that an answer may wait for others to be sent with
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
    def of_this_process(cls, recipe: Recipe) -> Limits:
        """With this process's share of its node's cores; a worker is replaced before the phase seems to stand still.

        Workers that wait for a service need no core, and wait for as long as that may take.
        """
        stall_seconds = recipe.run.stall_seconds
        if service := recipe.reward.service:
            return cls(workers=service.at_once, patience=stall_seconds)
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
        self._keeper = Channel(ours)
        self._asked = self._answered = 0  # responses
        self._unsent: list[bytes] = []
        self._prompt: tuple[Prompt, bytes] | None = None  # the last one that was asked about, as it is sent

    def ask(self, prompt: Prompt, response: str) -> int:
        """Have a response scored, from the next call of `verdicts` on at the latest.

        Returns at once, with the number of the question.
        """
        return self._ask(prompt, response, 1)

    def ask_group(self, prompt: Prompt, responses: Sequence[str]) -> range:
        """The same for all responses to a prompt together, by a `GroupVerifier`; limits are then of the whole group."""
        first = self._ask(prompt, tuple(responses), len(responses))
        return range(first, first + len(responses))

    def _ask(self, prompt: Prompt, responses: str | tuple[str, ...], count: int) -> int:
        if self._prompt is None or self._prompt[0] is not prompt:
            # tokens, which no verifier reads, may be most of a prompt
            self._prompt = prompt, pickle.dumps(replace(prompt, tokens=()))
        number = self._asked
        self._asked += count
        self._unsent.append(pack_question(number, self._prompt[1], responses))
        if len(self._unsent) == BATCH:
            self._send()
        return number

    def _send(self) -> None:
        if self._unsent:
            self._keeper.send(len(self._unsent), b"".join(self._unsent))
            self._unsent = []

    def verdicts(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> list[tuple[int, Verdict]]:
        """(number of the question, verdict) of what has been scored since the last call, in any order.

        wait: until there is one, if there are questions without an answer, or until ``unless`` becomes true.
        """
        if self._asked == self._answered:
            return []
        self._send()
        while not (answers := self._receive()) and wait and not unless():
            unsent = [self._keeper.socket] if self._keeper.unsent else []
            select.select([self._keeper.socket], unsent, [], POLL_SECONDS)
        self._answered += len(answers)
        return answers

    def _receive(self) -> list[tuple[int, Verdict]]:
        self._keeper.flush()
        answers = []
        for number, answer in [item for _, body in self._keeper.receive() for item in json.loads(body)]:
            if "mistake" in answer:
                raise UserError(answer["mistake"])
            if "unavailable" in answer:
                raise VerifierUnavailable(answer["unavailable"])
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


@dataclass(eq=False)
class _Question:
    number: int
    responses: int
    packed: bytes
    attempts: int = 0


@dataclass
class _Worker:
    pid: int
    channel: Channel
    current: mmap.mmap  # the number of the question that it scores
    questions: deque[_Question] = field(default_factory=deque)  # that it has not answered, in order
    ran: int = 0  # nanoseconds of processor time when it was last seen to run
    seen: float = 0.0  # when that was, `time.monotonic`
    ended: bool = False

    def begin(self, questions: Iterable[_Question]) -> None:
        self.questions.extend(questions)
        self.ran, self.seen = self._processor_time(), time.monotonic()
        self.channel.send(len(self.questions), b"".join(question.packed for question in self.questions))

    def is_stuck(self, patience: float) -> bool:
        """Whether it has not run at all for so many seconds, though it has questions."""
        if not self.questions or time.monotonic() - self.seen <= patience:
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
        self.asker, self.limits = Channel(asker), limits
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
            for _, body in self.asker.receive():
                self.waiting += [_Question(*question) for question in split(body)]
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
        busy = any(worker.questions for worker in self.workers)
        select.select([channel.socket for channel in channels], unsent, [], POLL_SECONDS if busy else None)
        for channel in channels:
            channel.flush()

    def _hear(self, worker: _Worker) -> None:
        """Take a worker's verdicts, notice its end, or end it."""
        for answered, body in worker.channel.receive():
            self.asker.send(answered, body)
            for _ in range(answered):
                worker.questions.popleft()
        if worker.is_stuck(self.limits.patience):
            os.kill(worker.pid, signal.SIGKILL)
        elif not worker.channel.closed:
            return
        _, status = os.waitpid(worker.pid, 0)
        worker.channel.socket.close()
        worker.ended = True
        code = os.waitstatus_to_exitcode(status)
        (current,) = NUMBER.unpack(worker.current)
        left = [question for question in worker.questions if code == 0 or not self._ended_by(question, current, code)]
        self.waiting.extendleft(reversed(left))

    def _ended_by(self, question: _Question, current: int, code: int) -> bool:
        """Whether a worker ended because of this question of those it had, which is then answered."""
        if question.number != current:
            return False
        question.attempts += 1
        if code == -signal.SIGKILL and question.attempts < ATTEMPTS:  # by a person, the kernel, or `_hear`
            return False
        over = "time" if code == -signal.SIGPROF else "died"  # as C code does that gets no memory, or recurs too deep
        numbers = range(question.number, question.number + question.responses)
        self.asker.send(1, pack_answers((number, {"score": 0.0, "over": over}) for number in numbers))
        return True

    def _hand_out(self) -> None:
        idle = [worker for worker in self.workers if not worker.questions]
        while self.waiting and (idle or len(self.workers) < self.limits.workers):
            worker = idle.pop() if idle else self._fork()
            # fewer the fewer are left, so that no worker is still busy for long when the others have no more
            share = min(BATCH, -(-len(self.waiting) // (2 * self.limits.workers)))
            worker.begin([self.waiting.popleft() for _ in range(share)])

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        current = mmap.mmap(-1, NUMBER.size)
        pid = os.fork()
        if not pid:
            _in_fork(theirs, lambda: _work(theirs, self.verifier, self.limits, current))
        theirs.close()
        self.workers.append(_Worker(pid, Channel(ours), current))
        return self.workers[-1]

    def _end(self, answer: dict[str, str]) -> NoReturn:
        self.asker.socket.setblocking(True)
        self.asker.send(1, pack_answers([(0, answer)]))
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


def _work(keeper: socket.socket, verifier: Verifier, limits: Limits, current: mmap.mmap) -> None:
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
    with keeper.makefile("rb") as messages:
        while header := messages.read(MESSAGE.size):
            answers: list[tuple[int, dict[str, Any]]] = []
            answered, sent = 0, time.monotonic()
            left, size = MESSAGE.unpack(header)
            for number, count, packed in split(messages.read(size)):
                current[:] = NUMBER.pack(number)
                prompt, responses = unpack_question(packed)
                signal.setitimer(signal.ITIMER_PROF, limits.seconds)
                found = _score(verifier, prompt, responses)
                signal.setitimer(signal.ITIMER_PROF, 0)
                # one answer to a group is that to each of it
                answers += zip(range(number, number + count), found * count if len(found) == 1 else found, strict=True)
                answered, left = answered + 1, left - 1
                # what this response left behind is not to count against the next one
                worn = found[0].get("over") or _memory() - begin > limits.memory // 8
                if worn or not left or time.monotonic() - sent > SECONDS_TO_ANSWER:
                    body = pack_answers(answers)
                    keeper.sendall(MESSAGE.pack(answered, len(body)) + body)
                    answers, answered, sent = [], 0, time.monotonic()
                if worn:
                    return


def _score(verifier: Verifier, prompt: Prompt, responses: str | tuple[str, ...]) -> list[dict[str, Any]]:
    """The answer to each of the responses; a single one where it is the same for all."""
    random.seed(0)
    if "sympy.core.random" in sys.modules:  # it tests equality at random points
        sys.modules["sympy.core.random"].seed(0)
    try:
        if isinstance(responses, str):
            return [_answer(verifier.score(prompt, responses))]
        return [_answer(found) for found in cast(GroupVerifier, verifier).score_group(prompt, responses)]
    except MemoryError:
        return [{"score": 0.0, "over": "memory"}]
    except UserError as error:
        return [{"mistake": str(error)}]
    except VerifierUnavailable as error:
        return [{"unavailable": str(error)}]
    except Exception:
        text = responses if isinstance(responses, str) else responses[0]
        return [{"error": f"{prompt.text[:60]!r}, answered by {text[:60]!r}:\n{traceback.format_exc()}"}]


def _answer(found: float | Score) -> dict[str, Any]:
    if not isinstance(found, Score):
        return {"score": found}
    return {"score": found.value, "over": found.over, "reward": found.reward, "extra": found.extra}


def _memory() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
