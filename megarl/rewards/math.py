"""Mathematical equality of the final answers, decided by math-verify in a process of its own.

A hostile formula can cost SymPy hours or all memory, and math-verify's own time limit works only in the main thread and
between two bytecodes. Here the kernel ends the worker when its time is up, whatever it is doing, and the response
scores 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.rewards import Verifier, right_answer


def check(recipe: Recipe) -> None:
    """Suits all data; an answer that is no mathematics is a `UserError` when a response to it is scored."""


def build(prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Math()


class Math:
    """Scores 1 or 0. The worker is started for the first response, and again after each one that it did not survive."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds  # wall time for one response
        self._worker: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def score(self, prompt: Prompt, response: str) -> float:
        answer = right_answer(prompt)
        with self._lock:
            verdict = self._ask({"answer": answer, "response": response})
        if verdict == "unreadable":
            raise UserError(
                f"the answer {answer[:60]!r} of prompt {prompt.text[:60]!r} is no mathematics; "
                'use reward.kind = "exact"'
            )
        return float(verdict == "right")

    def close(self) -> None:
        """End the worker; a later `score` starts another."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def __del__(self) -> None:
        self.close()

    def _ask(self, question: dict[str, str]) -> str:
        worker = self._worker = self._worker or self._start()
        assert worker.stdin and worker.stdout
        try:
            worker.stdin.write(json.dumps(question) + "\n")
            worker.stdin.flush()
            verdict = worker.stdout.readline().strip()
        except BrokenPipeError:
            verdict = ""
        if not verdict:  # it ran out of time or memory
            self.close()
        return verdict

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megarl.rewards.math_worker", str(self.seconds)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdout
        if worker.stdout.readline().strip() != "ready":
            raise UserError("math-verify does not start; its own message is above")
        return worker
