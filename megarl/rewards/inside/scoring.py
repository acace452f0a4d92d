"""Runs in a sandbox: scores responses with scorers of reasoning-gym that pass them to ``eval`` or to SymPy's parser.

Two things keep a response from deciding on its own score. Only data reaches those scorers: ``eval`` is replaced by
`literal` in their modules, and SymPy's parser by `formula`. And each response is scored in a fork of its own, which may
neither start a process nor create a file and is killed afterwards, so whatever a response changes ends with it.

Messages begin with their length. The first one has the scorers, the others one question each; the answers are lines.
"""

from __future__ import annotations

import ast
import gc
import glob
import os
import pickle
import random
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}
FUNCTIONS = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "Abs"}
CONSTANTS = {"E", "I", "pi"}
ITEMS = 4  # of each scorer, whose answers are scored first, which fills the caches of SymPy that all forks inherit


class NotData(BaseException):
    """A response is neither a literal nor a formula. Not an `Exception`, which scorers would catch."""


def literal(text: str) -> Any:
    """In place of ``eval``: the value of a literal of Python, such as a list of lists of numbers."""
    try:
        return ast.literal_eval(text)
    except Exception as error:
        raise NotData from error


def formula(text: str, local_dict: dict[str, Any] | None = None, **options: Any) -> Any:
    """In place of SymPy's ``parse_expr``: the expression of a formula of numbers, symbols and elementary functions."""
    import sympy

    def build(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int()) if not isinstance(node.value, bool):
                return sympy.Integer(node.value)
            case ast.Constant(value=float()):
                return sympy.Float(ast.get_source_segment(text, node))
            case ast.Name(id=name) if name in (local_dict or {}):
                return (local_dict or {})[name]
            case ast.Name(id=name) if name in CONSTANTS:
                return getattr(sympy, name)
            case ast.Name(id=name) if name.isalnum() and name not in FUNCTIONS:
                return sympy.Symbol(name)
            case ast.UnaryOp(op=ast.USub()):
                return -build(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return build(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](build(node.left), build(node.right))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return getattr(sympy, name)(*map(build, node.args))
        raise NotData

    try:
        text = text.strip()
        return build(ast.parse(text, mode="eval").body)
    except Exception as error:
        raise NotData from error


def score(scorer: Any, answer: str, entry: dict[str, Any]) -> float:
    """The score of one response; 0 if the scorer cannot read it."""
    try:
        return float(scorer.score_answer(answer=answer, entry=entry))
    except BaseException:
        return 0.0


def limit(seconds: float) -> None:
    """Limit the processor time of this process, and keep it from starting another one."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    most = 2 * int(seconds) + 1  # only for a process that stops the timer: the kernel may count twice the time
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also inside C code


def in_fork(question: bytes, scorers: dict[Any, Any], seconds: float) -> bytes:
    """The answer to a question: a score, "time" or "died". Exits if the fork was killed from outside."""
    result, end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(end, 0)
            os.closerange(3, 64)
            limit(seconds)
            name, answer, entry = pickle.loads(question)
            os.write(0, repr(score(scorers[name], answer, entry)).encode())
        finally:
            os._exit(0)
    os.close(end)
    said = os.read(result, 100)
    os.close(result)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if said:
        return said.split(b"\n")[0]
    if code == -signal.SIGKILL:
        sys.exit(1)
    return b"time" if code == -signal.SIGPROF else b"died"


def main() -> None:
    sys.path += sorted(glob.glob("/packages/*"))
    sys.modules["cellpylib"] = types.ModuleType("cellpylib")  # only generators need it; imports matplotlib
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    import sympy
    import sympy.core.random

    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        module.parse_expr = formula
    scorers, seconds = pickle.loads(requests.read(int.from_bytes(requests.read(4), "big")))
    for scorer in scorers.values():
        vars(sys.modules[type(scorer).__module__])["eval"] = literal
        for item in range(ITEMS):
            score(scorer, scorer[item]["answer"], scorer[item])
    random.seed(0)
    sympy.core.random.seed(0)  # SymPy tests equality at random points
    gc.freeze()
    replies.write(b"ready\n")
    while header := requests.read(4):
        replies.write(in_fork(requests.read(int.from_bytes(header, "big")), scorers, seconds) + b"\n")


if __name__ == "__main__":
    main()
