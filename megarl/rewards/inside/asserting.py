"""Runs in a sandbox of its own: the tests of a row, which never meet the program.

What of the program they name is a stand-in that asks the program's sandbox, and gets plain data. So no operator, no
patched function, no exit of the program's own decides a test. That all tests held is told by an exit status that is
drawn for this run; an early end of any kind has another one.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from typing import Any

LONGEST = 16 << 20  # bytes of a reply
UNUSABLE = 3  # exit status: the tests ask for what cannot be done, whatever the program is


class ProgramFailed(Exception):
    """The program gave no answer, or none that can be read."""


class Unusable(BaseException):
    """The tests pass a function of their own to the program, or the like."""


class Wire:
    """To the program."""

    def __init__(self) -> None:
        self.replies, self.requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "r+b") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(nothing.fileno(), 1)

    def ask(self, do: str, target: Any, arguments: Any = (), named: Any = None) -> Any:
        from values import encode  # type: ignore[import-not-found]

        request = {
            "do": do,
            "of": encode(target, keep),
            "arguments": encode(list(arguments), keep),
            "named": encode(named or {}, keep),
        }
        try:
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()
        except BrokenPipeError as error:
            raise ProgramFailed("it has ended") from error
        return self.answer()

    def answer(self) -> Any:
        from values import decode

        line = self.replies.readline(LONGEST)
        try:
            answer = json.loads(line)
            if "raise" not in answer:
                return decode(answer["value"], lambda number: Remote(self, {"object": int(number)}))
            kind, text = getattr(builtins, answer["raise"], None), str(answer["text"])
        except Exception as error:
            raise ProgramFailed("no answer that can be read") from error
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise ProgramFailed(text)


class Remote:
    """Stands for an object of the program. It equals nothing: its own comparison could say what it likes."""

    def __init__(self, wire: Wire, target: Any) -> None:
        self._wire, self._target = wire, target

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._wire.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._wire.ask("attribute", self, (name,))

    def __iter__(self) -> Any:
        return iter(self._wire.ask("items", self))

    def __getitem__(self, key: Any) -> Any:
        return self._wire.ask("item", self, (key,))

    def __bool__(self) -> bool:
        return self._wire.ask("truth", self) is True

    def __len__(self) -> int:
        length = self._wire.ask("length", self)
        if type(length) is not int:
            raise ProgramFailed("no length")
        return length


def keep(value: Any) -> Any:
    """A stand-in goes back as what it stands for; nothing else but plain values leaves this side."""
    if isinstance(value, Remote):
        return value._target
    raise Unusable(f"tests pass a {type(value).__name__} to the program")


def names_of(tests: ast.Module) -> set[str]:
    """What the tests use and do not define."""
    nodes = [node for node in ast.walk(tests) if isinstance(node, ast.Name)]
    defined = {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tests):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return {node.id for node in nodes} - defined


def main() -> None:
    sys.path.insert(0, "/box")
    sys.set_int_max_str_digits(0)
    with open("/box/tests.json") as file:
        task = json.load(file)
    wire = Wire()
    code = 1
    try:
        wire.answer()  # that it is loaded
        tests = ast.parse(task["tests"])
        space: dict[str, Any] = {"__name__": "tests"}
        for name in names_of(tests):
            if name == task["entry_point"] or not (hasattr(builtins, name) or name in sys.stdlib_module_names):
                space[name] = Remote(wire, name)
            elif name in sys.stdlib_module_names:
                space[name] = importlib.import_module(name)
        exec(compile(tests, "tests", "exec"), space)
        code = task["passed"]
    except Unusable:
        code = UNUSABLE
    except BaseException:
        code = 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
