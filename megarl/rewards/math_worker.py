"""The process behind `megarl.rewards.math`: one JSON line in, one word out ("right", "wrong" or "unreadable")."""

from __future__ import annotations

import functools
import json
import logging
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

MEMORY = 4 << 30  # bytes of address space, or 10**10**10 would take all of the machine's


@functools.lru_cache(1024)
def parse_answer(answer: str) -> list[Any]:
    """The right answer: bare (42, 1/2, \\frac{1}{2}) or in a text with $...$ or \\boxed{...}."""
    dressed = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return parse(dressed, parsing_timeout=None)


def judge(answer: str, response: str) -> str:
    gold = parse_answer(answer)
    if not gold:
        return "unreadable"
    return "right" if verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None) else "wrong"


def serve(seconds: float) -> None:
    logging.disable(logging.CRITICAL)  # math-verify logs every formula that it cannot read
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # a scheduler sends it to all processes, but the parent still needs this one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, also inside C code
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        question = json.loads(line)
        try:
            verdict = judge(question["answer"], question["response"])
        except (MemoryError, RecursionError, ArithmeticError, ValueError, TypeError):
            verdict = "wrong"
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(verdict, flush=True)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
