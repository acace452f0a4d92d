"""Runs the assertions of a row in a sandbox of their own, separate from the program that they test.

The program's names are proxies here, which send requests to the program's sandbox and get plain data back. So no
operator, patched function or exit of the program can decide a test. Success is an exit status that is drawn anew for
each run; any premature end gives another one.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import os
import symtable
import sys
from typing import Any

LONGEST = 16 << 20  # bytes of a reply
UNUSABLE = 3  # exit status: the tests passed what is no plain data to the program, such as a function


class ProgramFailed(Exception):
    """The program did not answer, or its answer cannot be read."""


class Wire:
    """The connection to the program's sandbox: requests on standard output, replies on standard input."""

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
        except OSError as error:
            raise ProgramFailed("it has ended") from error
        return self.answer()

    def answer(self) -> Any:
        from values import decode

        try:
            answer = json.loads(self.replies.readline(LONGEST))
            if "raise" not in answer:
                return decode(answer["value"], lambda number: Remote(self, {"object": int(number)}))
            kind, text = getattr(builtins, answer["raise"], None), str(answer["text"])
        except Exception as error:
            raise ProgramFailed("no answer that can be read") from error
        # an iterator that gets StopIteration from the program would end as if all its items had been tested
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
            raise kind(text)
        raise ProgramFailed(text)


class Remote:
    """A proxy for an object of the program. It equals nothing, since the object's ``__eq__`` cannot be trusted."""

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
    """For `encode`: a proxy is sent as a reference to its object; others that are no plain data end the tests."""
    if isinstance(value, Remote):
        return value._target
    os._exit(UNUSABLE)


def same_list(found: Any, expected: Any) -> bool:
    """LiveCodeBench's comparison (`grade_call_based`): equal, also if a tuple is returned in place of a list."""
    return bool((list(found) if isinstance(found, tuple) else found) == expected)


def close(found: Any, expected: Any) -> bool:
    """The comparison of functions in files of APPS and TACO, whose values were JSON: equal but for the last digits of
    floats, tuples in place of lists, and numbers in place of the texts that are keys; or the only item of ``expected``,
    in which many of their rows wrap what is returned."""
    return _close(found, expected) or (isinstance(expected, list) and len(expected) == 1 and _close(found, expected[0]))


def _close(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return found == expected or math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(expected, list) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(_close, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        named = found if found.keys() == expected.keys() else {str(key): value for key, value in found.items()}
        same = named.keys() == expected.keys() and len(named) == len(found)
        return same and all(_close(named[key], expected[key]) for key in expected)
    return bool(found == expected)


class Space(dict[str, Any]):
    """The global names of the tests. ``fixed`` ones stay the program's: a star import does not replace them."""

    fixed: frozenset[str] = frozenset()

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.fixed:
            super().__setitem__(name, value)


def names_of(tests: str) -> set[str]:
    """The global names that the tests use but do not define."""
    module = symtable.symtable(tests, "tests", "exec")
    used: set[str] = set()
    scopes = [module]
    for scope in scopes:
        scopes += scope.get_children()
        symbols = [each for each in scope.get_symbols() if each.is_referenced()]
        used |= {each.get_name() for each in symbols if scope is module or each.is_global()}
    return used - {each.get_name() for each in module.get_symbols() if each.is_assigned() or each.is_imported()}


def main() -> None:
    sys.path.insert(0, "/box")
    sys.set_int_max_str_digits(0)
    with open("/box/tests.json") as file:
        task = json.load(file)
    wire = Wire()
    code = 1
    try:
        wire.answer()  # the program has been loaded
        modules: dict[str, Any] = sys.modules
        modules["solution"] = Remote(wire, {"object": 0})  # from which the tests of KodCode import
        space = Space({"__name__": "__main__", "__close__": close, "__same_list__": same_list})
        space.update(inf=math.inf, nan=math.nan)  # how Python writes these values of JSON
        known = {*space, *dir(builtins), *sys.stdlib_module_names}
        for name in names_of(task["tests"]):
            if name == task["entry_point"] or name not in known:
                space[name] = Remote(wire, name)
            elif name in sys.stdlib_module_names:
                space[name] = importlib.import_module(name)
        space.fixed = frozenset({task["entry_point"]} & {name for name in space if isinstance(space[name], Remote)})
        exec(compile(task["tests"], "tests", "exec"), space)
        code = task["passed"]
    except BaseException:
        code = 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
