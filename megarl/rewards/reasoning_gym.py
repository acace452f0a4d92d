"""The verifier that calls the scorer of the prompt's generator.

Some scorers of reasoning-gym 0.1.25 pass the response to Python's ``eval`` or to SymPy's ``parse_expr``, which also
evaluates. Those run in a sandbox, where each response has a process of its own and only data is evaluated
(`megarl.rewards.inside.scoring`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import socket
import sys
from pathlib import Path
from typing import Any

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import TAGGED, Score, Verifier, inside
from megarl.rewards.sandbox import POLL_SECONDS, Limits, Program, Run, SandboxError, check_sandbox, python_command

EVALUATING = {
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),  # eval
    *("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"),  # SymPy
}
# what may stand around an answer: a fence, bold, code, quotes, a formula, a box
DRESS = re.compile(
    r'```\w*\n(.+)```|(\*\*|__|\$\$|[*`$"])(.+)\2|\\[(\[](.+)\\[)\]]|\\(?:boxed|text|textbf)\{(.+)\}|\u201c(.+)\u201d',
    re.DOTALL,
)
LAYERS = 4  # of it, at most
SECONDS = 5.0  # processor time of a response
ATTEMPTS = 2  # times that a response is scored if its sandbox ends
# no file can be created: an empty /tmp takes the only one
SANDBOX = Limits(seconds=10**6, memory=4 << 30, disk=4096, files=1, forks=True)
SCRIPT = "/box/scoring.py"


def check(recipe: Recipe) -> None:
    """Raise `UserError` if prompts come from a file, which has no scorer, or if a scorer needs a sandbox that fails."""
    if recipe.data.files:
        raise UserError('reward.kind = "reasoning_gym" needs data.source = "reasoning_gym"')
    for suite in recipe.suites:
        if suite.data.source == "file":
            raise UserError(
                'reward.kind = "reasoning_gym" cannot score eval.source = "file": '
                f'{suite.data.train}; use "exact" or "math"'
            )
    names = {table.train for table in recipe.prompt_sources()}
    names |= {each.get("name") for table in recipe.prompt_sources() for each in table.options.get("datasets", [])}
    if evaluating := sorted(EVALUATING & names):
        try:
            check_sandbox()
        except UserError as error:
            raise UserError(
                f"the scorer of {evaluating[0]} evaluates responses, so it needs a sandbox: {error}"
            ) from error


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return ReasoningGym(prompts.scorers)


class ReasoningGym:
    """Scores in [0, 1], with the partial credit of the generator's scorer."""

    def __init__(self, scorers: dict[str, Any]) -> None:
        self._scorers = scorers  # generator name -> data set
        evaluating: dict[tuple[str, str], Any] = {}
        for name, scorer in scorers.items():
            inner = scorer.datasets if name == "composite" else {name: scorer}
            evaluating |= {(name, source): inner[source] for source in EVALUATING & inner.keys()}
        self._sandbox = Sandbox(evaluating)

    def score(self, prompt: Prompt, response: str) -> float | Score:
        answers = answers_in(response)
        best = self._score(prompt, answers[0])
        for answer in answers[1:]:
            if _value(best) < 1.0:
                best = max(best, self._score(prompt, answer), key=_value)
        return best

    def _score(self, prompt: Prompt, response: str) -> float | Score:
        # for a composite generator: the generator inside it that made this item
        name = prompt.entry["generator"]
        source = prompt.entry["metadata"].get("source_dataset", name)
        if source in EVALUATING:
            return self._sandbox.score((name, source), response, prompt.entry)
        try:
            score = float(self._scorers[name].score_answer(answer=response, entry=prompt.entry))
            return score if 0.0 <= score <= 1.0 else 0.0  # 0 for NaN, too
        except MemoryError:
            raise
        except Exception:
            return 0.0  # some scorers, as of prime_factorization, raise on text that they cannot parse


def answers_in(response: str) -> list[str]:
    """The answer of a response in the ways in which it may be meant: scorers take white space, bold or a final dot for
    a part of it, which they are of some answers.

    As with the library's `extract_answer` it stands in the last <answer>; else it is what follows any thoughts.
    """
    text = response.rpartition("</think>")[2]
    text = (TAGGED.findall(text) or [text])[-1]
    plain = text.strip()
    bare = _bare(plain.removesuffix("."))
    return list(dict.fromkeys((plain, text, _bare(plain), bare, bare.removesuffix("."))))


def _bare(text: str) -> str:
    for _ in range(LAYERS):
        if (found := DRESS.fullmatch(text)) and found.lastindex:
            text = found[found.lastindex].strip()
    return text


def _value(score: float | Score) -> float:
    return score.value if isinstance(score, Score) else score


class Sandbox:
    """A sandbox with the scorers that evaluate responses. It starts with the first response."""

    def __init__(self, scorers: dict[tuple[str, str], Any]) -> None:
        self._scorers = scorers
        self._processes: contextlib.ExitStack | None = None

    def score(self, scorer: tuple[str, str], response: str, entry: dict[str, Any]) -> Score:
        """The score of a response. One that twice ends the sandbox, or lets it hang, has the score 0."""
        question = pickle.dumps((scorer, response, entry))
        for _ in range(ATTEMPTS):
            if self._processes is None:
                self._start()
            said = self._ask(question)
            if said is not None:
                with contextlib.suppress(ValueError):
                    score = float(said)
                    return Score(score if 0.0 <= score <= 1.0 else 0.0)
                return Score(0.0, over="time" if said == b"time" else "died")
            self._stop()
        return Score(0.0, over="died")

    def _start(self) -> None:
        packages = [path for path in dict.fromkeys(sys.path) if Path(path).name in ("site-packages", "dist-packages")]
        script = Path(inside.__file__).parent / "scoring.py"
        binds = {os.path.realpath(path): f"/packages/{number}" for number, path in enumerate(packages)}
        program = Program(python_command(SCRIPT), {SCRIPT: script.read_bytes()}, binds)
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            self._socket = stack.enter_context(ours)
            with theirs:
                self._run = stack.enter_context(Run(program, SANDBOX, theirs.fileno(), theirs.fileno()))
            if self._ask(pickle.dumps((self._scorers, SECONDS)), starts=True) != b"ready":
                self._run.stop()
                raise SandboxError(f"the scorers do not start in the sandbox: {self._run.finish()}")
            self._processes = stack.pop_all()

    def _stop(self) -> None:
        assert self._processes is not None
        self._processes.close()
        self._processes = None

    def _ask(self, message: bytes, starts: bool = False) -> bytes | None:
        """Send a message and return the line that answers it; None if the sandbox has ended or does nothing.

        starts: it imports, and may have to wait long for a file system; the phase has a limit of its own for that.
        """
        self._run.awake()
        line = b""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(len(message).to_bytes(4, "big") + message)
            while not line.endswith(b"\n"):
                if select.select([self._socket], [], [], POLL_SECONDS)[0]:
                    if not (data := self._socket.recv(100)):
                        return None
                    line += data
                elif not starts and self._run.is_asleep():
                    return None
            return line[:-1]
        return None
