"""Mathematical equality of the final answers, decided by math-verify in a process of its own.

SymPy can take hours, or all memory, over a hostile formula, and math-verify's own time limit works in a main thread and
between two bytecodes only. Here the kernel ends the worker when its time is up, whatever it is doing, and the response
scores 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading

from megarl.data.prompts import Prompt
from megarl.errors import UserError
from megarl.rewards import right_answer


class Math:
    """One worker process, started at the first response and again after each one that it did not survive."""

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
        if not verdict:  # time or memory was up
            self.close()
        return verdict

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megarl.rewards.math_worker", str(self.seconds)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdout
        if worker.stdout.readline().strip() != "ready":
            raise UserError("math-verify does not start; its own message stands above")
        return worker
