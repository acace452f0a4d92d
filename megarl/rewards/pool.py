"""Runs verifiers in separate processes, so that no response can crash the process that generates or make it wait.

That process, the client, submits responses, goes on, and collects the verdicts later. Before it starts threads or CUDA
it forks one process, the supervisor, which builds the verifier, forks workers that score one response at a time, and
replaces those that exceed a limit. Limits hold inside C code, too, which a hostile formula can keep busy for hours. A
forked process ends with the one that forked it, at the latest when its socket closes. Responses travel in batches,
because a message takes longer than comparing two short answers.

A verdict depends only on the response. So the time limit counts CPU time, which does not depend on the machine's load,
and if a worker ends for another reason, such as a kill, the response that it was scoring is scored again. Pools of
libraries, such as pebble's, limit wall time and fork workers from a process with threads.
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
BATCH = 32  # the most questions in a message
SECONDS_TO_ANSWER = 0.01  # how long an answer may be held back to send it with others
POLL_SECONDS = 0.5  # between two checks of workers that send nothing
ATTEMPTS = 2  # times that a response is scored if its worker is killed from outside


@dataclass(frozen=True)
class Limits:
    """Limits on scoring one response, and the number of workers."""

    seconds: float = 5.0  # CPU time
    memory: int = 4 << 30  # bytes in addition to those of a new worker; evaluating 10**10**10 would take all memory
    patience: float = 60.0  # a worker that scores but gets no CPU time for so many seconds is replaced: it was stopped
    workers: int = 4  # the most workers; one is forked only when a response would have to wait for the others

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
        return cls(workers=workers, patience=min(cls.patience, stall_seconds / 4))


@dataclass(frozen=True)
class Verdict:
    """The result of scoring a response. A response that exceeded a limit of the pool has the score 0."""

    score: float  # in [0, 1]
    over: str | None = None  # the exceeded limit: "time" | "memory" | "died" (crashed), or one of the verifier's own
    reward: float | None = None  # as in `Score`
    extra: float = 0.0  # as in `Score`

    @property
    def found(self) -> Score:
        """The verdict as a `Score`."""
        return Score(self.score, self.over, self.reward, self.extra)


def _verdict(answer: dict[str, Any]) -> Verdict:
    return Verdict(answer["score"], answer.get("over"), answer.get("reward"), answer.get("extra", 0.0))


class VerifierPool:
    """The client's side. Construct it before the process starts threads or initialises CUDA, since it forks.

    ``build`` makes the verifier, in the supervisor. `verdicts` raises any `UserError` that it or the verifier raises.
    """

    def __init__(self, build: Callable[[], Verifier], limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            _in_fork(theirs, lambda: _Supervisor(theirs, build, limits).serve())
        theirs.close()
        self._supervisor = Channel(ours)
        self._asked = self._answered = 0  # responses submitted and scored
        self._unsent: list[bytes] = []
        self._prompt: tuple[Prompt, bytes] | None = None  # the last prompt submitted, and its pickled form

    def ask(self, prompt: Prompt, response: str) -> int:
        """Submit a response for scoring; returns its number at once.

        It may be sent to the supervisor only at the next call of `verdicts`.
        """
        return self._ask(prompt, response, 1)

    def ask_group(self, prompt: Prompt, responses: Sequence[str]) -> range:
        """Submit all responses to a prompt, for a `GroupVerifier`; returns their numbers.

        The limits then hold for the group as a whole.
        """
        first = self._ask(prompt, tuple(responses), len(responses))
        return range(first, first + len(responses))

    def _ask(self, prompt: Prompt, responses: str | tuple[str, ...], count: int) -> int:
        if self._prompt is None or self._prompt[0] is not prompt:
            # without tokens: they may be most of a prompt, and no verifier reads them
            self._prompt = prompt, pickle.dumps(replace(prompt, tokens=()))
        number = self._asked
        self._asked += count
        self._unsent.append(pack_question(number, self._prompt[1], responses))
        if len(self._unsent) == BATCH:
            self._send()
        return number

    def _send(self) -> None:
        if self._unsent:
            self._supervisor.send(len(self._unsent), b"".join(self._unsent))
            self._unsent = []

    def verdicts(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> list[tuple[int, Verdict]]:
        """(number of the response, verdict) of all responses scored since the last call, in any order.

        wait: if responses are still being scored, wait until there is a verdict or ``unless()`` is true.
        """
        if self._asked == self._answered:
            return []
        self._send()
        while not (answers := self._receive()) and wait and not unless():
            unsent = [self._supervisor.socket] if self._supervisor.unsent else []
            select.select([self._supervisor.socket], unsent, [], POLL_SECONDS)
        self._answered += len(answers)
        return answers

    def _receive(self) -> list[tuple[int, Verdict]]:
        self._supervisor.flush()
        answers = []
        for number, answer in [item for _, body in self._supervisor.receive() for item in json.loads(body)]:
            if "mistake" in answer:
                raise UserError(answer["mistake"])
            if "unavailable" in answer:
                raise VerifierUnavailable(answer["unavailable"])
            if "error" in answer:
                raise RuntimeError(f"the verifier failed:\n{answer['error']}")
            answers.append((number, _verdict(answer)))
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


@dataclass(eq=False)
class _Question:
    """A response, or a group of responses, to be scored."""

    number: int  # of its first response
    responses: int
    packed: bytes  # as `pack_question` returns it
    attempts: int = 0  # times that its worker ended while scoring it


@dataclass
class _Worker:
    """The supervisor's view of a worker process."""

    pid: int
    channel: Channel
    current: mmap.mmap  # shared memory: the number of the question that the worker is scoring
    questions: deque[_Question] = field(default_factory=deque)  # sent to it and not yet answered, in order
    ran: int = 0  # nanoseconds of CPU time when it was last seen to run
    seen: float = 0.0  # when that was, by `time.monotonic`
    ended: bool = False

    def begin(self, questions: Iterable[_Question]) -> None:
        self.questions.extend(questions)
        self.ran, self.seen = self._processor_time(), time.monotonic()
        self.channel.send(len(self.questions), b"".join(question.packed for question in self.questions))

    def is_stuck(self, patience: float) -> bool:
        """Whether it has questions but has got no CPU time for ``patience`` seconds."""
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


class _Supervisor:
    """Distributes the client's questions to workers, and forwards their verdicts to the client."""

    def __init__(self, client: socket.socket, build: Callable[[], Verifier], limits: Limits) -> None:
        self.client, self.limits = Channel(client), limits
        self.waiting: deque[_Question] = deque()
        self.workers: list[_Worker] = []
        os.nice(19)  # score only with CPU time that the generation leaves, and with all of it once that has ended
        try:
            self.verifier = build()
        except UserError as error:
            self._end({"mistake": str(error)})
        except BaseException:
            self._end({"error": traceback.format_exc()})

    def serve(self) -> None:
        """Run until the client closes its socket or ends."""
        while not self.client.closed:
            self._select()
            for _, body in self.client.receive():
                self.waiting += [_Question(*question) for question in split(body)]
            for worker in self.workers:
                self._poll(worker)
            self.workers = [worker for worker in self.workers if not worker.ended]
            self._dispatch()
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)

    def _select(self) -> None:
        """Wait until a socket can be read, or written if it has unsent data; no longer than a poll if workers score."""
        channels = [self.client, *(worker.channel for worker in self.workers)]
        unsent = [channel.socket for channel in channels if channel.unsent]
        busy = any(worker.questions for worker in self.workers)
        select.select([channel.socket for channel in channels], unsent, [], POLL_SECONDS if busy else None)
        for channel in channels:
            channel.flush()

    def _poll(self, worker: _Worker) -> None:
        """Forward a worker's verdicts. If it has ended, or is stuck and is killed, requeue its open questions."""
        for answered, body in worker.channel.receive():
            self.client.send(answered, body)
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
        """Whether a worker that ended with exit ``code`` ended because of this question; if so, answer it.

        current: the number of the question that the worker was scoring.
        """
        if question.number != current:
            return False
        question.attempts += 1
        if code == -signal.SIGKILL and question.attempts < ATTEMPTS:  # killed by a person, the kernel or `_poll`
            return False
        over = "time" if code == -signal.SIGPROF else "died"  # died: for example C code without memory or stack
        numbers = range(question.number, question.number + question.responses)
        self.client.send(1, pack_answers((number, {"score": 0.0, "over": over}) for number in numbers))
        return True

    def _dispatch(self) -> None:
        """Send waiting questions to idle workers, and fork new workers up to the limit."""
        idle = [worker for worker in self.workers if not worker.questions]
        while self.waiting and (idle or len(self.workers) < self.limits.workers):
            worker = idle.pop() if idle else self._fork()
            # batches shrink towards the end, so that no worker is busy for long after the others have finished
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
        """Tell the client why there is no verifier, and exit."""
        self.client.socket.setblocking(True)
        self.client.send(1, pack_answers([(0, answer)]))
        sys.exit(1)


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


def _work(supervisor: socket.socket, verifier: Verifier, limits: Limits, current: mmap.mmap) -> None:
    """In a worker: score one response after another. Ends early if one left too much memory in use or exceeded it."""
    logging.disable(logging.CRITICAL)  # math-verify logs every formula that it cannot read
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel should kill this process first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (begin + limits.memory,) * 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process, also inside C code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    supervisor.setblocking(True)
    with supervisor.makefile("rb") as messages:
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
                # a single answer to a group holds for each of its responses
                answers += zip(range(number, number + count), found * count if len(found) == 1 else found, strict=True)
                answered, left = answered + 1, left - 1
                # memory that this response left in use must not count against the next one
                worn = found[0].get("over") == "memory" or _memory() - begin > limits.memory // 8
                if worn or not left or time.monotonic() - sent > SECONDS_TO_ANSWER:
                    body = pack_answers(answers)
                    supervisor.sendall(MESSAGE.pack(answered, len(body)) + body)
                    answers, answered, sent = [], 0, time.monotonic()
                if worn:
                    return


def _score(verifier: Verifier, prompt: Prompt, responses: str | tuple[str, ...]) -> list[dict[str, Any]]:
    """The answer to each response of a question; a single one if it is the same for all."""
    random.seed(0)
    if "sympy.core.random" in sys.modules:  # SymPy tests equality at random points
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
        return [{"error": f"on prompt {prompt.text[:60]!r} with response {text[:60]!r}:\n{traceback.format_exc()}"}]


def _answer(found: float | Score) -> dict[str, Any]:
    if not isinstance(found, Score):
        return {"score": found}
    return {"score": found.value, "over": found.over, "reward": found.reward, "extra": found.extra}


def _memory() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
