"""Runs in the program's sandbox: loads the program and executes the requests of its tests.

Requests are read from standard input and replies written to standard output, one line each. The program can read,
change and forge everything here. That is safe: it learns only the arguments of its calls, and can forge only data.
"""

from __future__ import annotations

import json
import os
import resource
import symtable
import sys
import time
import types
from typing import Any


def main() -> None:
    sys.path.insert(0, "/box")
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(20_000)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    program = types.ModuleType("solution")
    sys.modules["solution"] = program
    objects: list[Any] = [program]

    with open("/box/seconds") as file:
        seconds = int(file.read())

    def reply(make: Any) -> None:
        of_all = resource.getrlimit(resource.RLIMIT_CPU)[1]
        # the kernel counts ticks: on a busy machine up to twice the time that a process ran
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * (time.process_time() + seconds)) + 1, of_all))
        try:
            answer = {"value": make()}
        except BaseException as error:
            kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answer = {"raise": kind.__name__, "text": str(error)[:1000]}
        replies.write(json.dumps(answer).encode() + b"\n")
        replies.flush()

    def load() -> None:
        for name in ("preamble.py", "program.py"):
            given = dict(program.__dict__)
            with open(f"/box/{name}", encoding="utf-8", errors="surrogateescape") as file:
                source = file.read()
            exec(compile(source, name, "exec"), program.__dict__)
        with open("/box/entry_point") as file:
            tested = file.read()
        unchanged = tested in given and program.__dict__.get(tested) is given[tested]
        if unchanged and not _binds(source, tested):  # what only the preamble defines is no answer
            del program.__dict__[tested]

    reply(load)
    for line in requests:
        request = json.loads(line)
        reply(lambda request=request: answer_to(request, program, objects))


def _binds(source: str, name: str) -> bool:
    """Whether a module assigns, defines or imports a global name."""
    symbols = symtable.symtable(source, "program.py", "exec").get_symbols()
    return any(each.get_name() == name and (each.is_assigned() or each.is_imported()) for each in symbols)


def named_in(program: types.ModuleType, name: str) -> Any:
    """The method of the program's class ``Solution``, which some data sets require, or its object of this name."""
    solution: Any = getattr(program, "Solution", None)
    return getattr(solution() if hasattr(solution, name) else program, name)


def answer_to(request: dict[str, Any], program: types.ModuleType, objects: list[Any]) -> Any:
    """Execute one request: a call, or an attribute, the items, an item, the truth value or the length of an object."""
    from values import decode, encode  # type: ignore[import-not-found]

    def keep(value: Any) -> dict[str, int]:
        objects.append(value)
        return {"object": len(objects) - 1}

    target = decode(request["of"], objects.__getitem__)
    target = named_in(program, target) if isinstance(target, str) else target
    arguments = decode(request["arguments"], objects.__getitem__)
    named = decode(request["named"], objects.__getitem__)
    does = {
        "call": lambda: target(*arguments, **named),
        "attribute": lambda: getattr(target, *arguments),
        "items": lambda: list(target),
        "item": lambda: target[arguments[0]],
        "truth": lambda: bool(target),
        "length": lambda: len(target),
    }
    return encode(does[request["do"]](), keep)


if __name__ == "__main__":
    main()
