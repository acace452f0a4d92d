"""Standard headers of C++ compiled beforehand, once a machine and compiler, and which of them a program is given.

A header that is compiled already stands for the header alone: GCC uses it only where that is the first thing of a
program, under the same settings and compiler, and otherwise reads the header as ever. So no program compiles with it
that would not without.

``<bits/stdc++.h>`` costs more than the programs that begin with it, so there is a second one of the headers that most
of them need. It stands for the whole one where nobody could tell the difference: in a program that contains no name
which only the whole one declares, neither as a use nor as a name of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import PhaseFailed, UserError
from megarl.rewards.sandbox import Limits, Program, run
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.files import make_directory, write_atomic

COMPILER = Path("/usr/bin/g++")
FLAGS = "-std=gnu++17 -O2"
WHOLE = "bits/stdc++.h"
HEADERS = (WHOLE, "iostream")  # of several in a program the first one is taken, which has the others
COMMON = "common/bits/stdc++.h"
COMMON_HEADERS = (
    *("algorithm", "array", "bitset", "cassert", "cctype", "cfloat", "climits", "cmath", "complex", "cstdint"),
    *(
        "cstdio",
        "cstdlib",
        "cstring",
        "ctime",
        "deque",
        "fstream",
        "functional",
        "initializer_list",
        "iomanip",
        "iostream",
    ),
    *("iterator", "limits", "list", "map", "numeric", "queue", "set", "sstream", "stack", "stdexcept", "string"),
    *("tuple", "type_traits", "unordered_map", "unordered_set", "utility", "vector"),
)
TEXTS = {header: f"#include <{header}>\n" for header in HEADERS} | {
    # without the special functions of <cmath> (`beta`, `legendre`), which would be a fifth of it
    COMMON: "#ifndef MEGARL_COMMON\n#define MEGARL_COMMON\n#include <bits/c++config.h>\n"
    "#undef _GLIBCXX_USE_STD_SPEC_FUNCS\n" + "".join(f"#include <{header}>\n" for header in COMMON_HEADERS) + "#endif\n"
}
REST = "rest.json"  # the names that a program must not contain for `COMMON` to stand for `WHOLE`
# declared by both, but with less behind them in `COMMON`: aliases of classes that only `WHOLE` defines, overloads for
# streams, and internals of the library
LESS = {b"pmr", b"uniform_int_distribution", b"__detail"}
MODULE = Path(__file__).read_bytes()  # another one may make other headers, or find other names
INSIDE = "/headers"  # where a compiler in the sandbox finds what `precompile` made
PRECOMPILING = Limits(seconds=120, memory=4 << 30, output=1 << 30, file_size=1 << 30, disk=1 << 30, forks=True)
# standard headers can be read in any order, and twice; whatever else stands before one may change what it means
# (and a comment that ends with \\ takes the next line, too)
BEGINNING = re.compile(rb"(?:\s+|//[^\n\\]*\n|#[ \t]*include[ \t]*<[a-z_/+.0-9]+>[ \t\r]*(?://[^\n\\]*)?\n)*")
INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*<([a-z_/+.0-9]+)>", re.MULTILINE)
WORD = re.compile(rb"[A-Za-z_][A-Za-z_0-9]*")
NUMBER = re.compile(rb"(?<!\w)\.?[0-9](?:[eEpP][+-]|[\w.'])*")
SUFFIXES = (b"h", b"min", b"s")  # with which those of <chrono> end, which are names as well
# what makes one word of two; other ways to include, and to name a suffix; a function of <cmath> as a template, whose
# overloads for <valarray> make it ambiguous
UNSURE = re.compile(
    rb"##|%:%:|\\[^\S\n]*\n|\bimport\b|\boperator\s*\""
    rb"|\b(?:abs|a?(?:cos|sin|tan)h?|atan2|exp|log|log10|pow|sqrt)\s*<\s*\w"
)
# of a preprocessed header: the name of a macro, one that a using-declaration brings into a namespace, a word that is
# not the member of something, a brace or a semicolon
TOKEN = re.compile(
    rb"""^\#define[ ](\w+).*
    | (?:u8|[uUL])?"(?:[^"\\\n]|\\.)*"\w* | (?:u8|[uUL])?'(?:[^'\\\n]|\\.)*' | \.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.'])*
    | \busing\s+\w*(?:\s*::\s*\w+)*\s*::\s*(\w+) | \w*(?:\s*(?:::|\.|->)\s*\w+)+ | ([A-Za-z_]\w*) | ([{};])""",
    re.MULTILINE | re.VERBOSE,
)
CLASSES = {b"class", b"struct", b"union"}
KEYWORDS = {b"const_cast", b"reinterpret_cast", b"static_cast", b"typename", b"void"}


def options(source: bytes) -> tuple[str, dict[str, str]]:
    """What the compiler is told of precompiled headers for a program, and the folders that it then has to see."""
    header, folder = header_of(source), headers_folder()
    if header is None or not (folder / f"{header}.gch").is_file():
        return "", {}
    use = f"-include {INSIDE}/{header}"
    if header == WHOLE and (folder / f"{COMMON}.gch").is_file() and needs_common_alone(source, folder):
        use = f"-I {INSIDE}/common -include {INSIDE}/{COMMON}"  # where <bits/stdc++.h> is this one
    return use, {str(folder): INSIDE}


def header_of(source: bytes) -> str | None:
    """Which of `HEADERS` the program may begin with: one of the standard headers that it includes before all else."""
    beginning = BEGINNING.match(source)
    names = INCLUDE.findall(beginning.group() if beginning else b"")
    return next((header for header in HEADERS if header.encode() in names), None)


def needs_common_alone(source: bytes, folder: Path) -> bool:
    """Whether `COMMON` instead of `WHOLE` changes nothing for the program."""
    includes, rest = [name.decode() for name in INCLUDE.findall(source)], _rest(folder)
    if len(includes) < source.count(b"include") or not {WHOLE, *COMMON_HEADERS}.issuperset(includes):
        return False
    if UNSURE.search(source) or any(number.endswith(SUFFIXES) for number in NUMBER.findall(source)):
        return False
    return rest is not None and rest.isdisjoint(WORD.findall(INCLUDE.sub(b"", source)))


def _rest(folder: Path) -> frozenset[bytes] | None:
    """None where it is missing or damaged."""
    with contextlib.suppress(UserError):
        return _read_rest(folder / REST)
    return None


@functools.cache
def _read_rest(path: Path) -> frozenset[bytes]:
    return frozenset(name.encode() for name in read_checked(path, "", needs_checksum=True)["names"])


def headers_folder() -> Path:
    """Of this compiler and this module, in the user's cache."""
    cache = Path(os.environ.get("MEGARL_CACHE") or "~/.cache/megarl").expanduser()
    state = COMPILER.resolve().stat()
    made_by = f"{state.st_size} {state.st_mtime_ns} ".encode() + MODULE
    return cache / f"headers-{hashlib.sha256(made_by).hexdigest()[:16]}"


def make_headers() -> None:
    """Compile `TEXTS` once on this machine. Without them programs are compiled as well, only not as fast."""
    folder = headers_folder()
    for header, text in TEXTS.items():
        if not _is_made(header, folder):
            try:
                with _alone(folder):
                    if not _is_made(header, folder):
                        _make(header, text.encode())
            except (OSError, UserError, PhaseFailed) as error:
                print(f"C++ programs are compiled without a precompiled {header}: {error}", file=sys.stderr)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process adds headers at the same time: two that write one file may leave half of it."""
    make_directory(folder)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_made(header: str, folder: Path) -> bool:
    return (folder / f"{header}.gch").is_file() and (header != COMMON or _rest(folder) is not None)


def _make(header: str, text: bytes) -> None:
    if header == COMMON:
        names = {name for _, name in declared(TEXTS[WHOLE].encode()) ^ declared(text)} - KEYWORDS | LESS
        write_checked(headers_folder() / REST, {"names": sorted(name.decode() for name in names)})
    precompile(header, text)


def declared(text: bytes) -> set[tuple[str, bytes]]:
    """(kind, name) of what a header with this text declares, and some more: all words outside of bodies.

    Kinds: "macro", "using", "body" (a class is more than announced), "word". What stands in the body of a class is
    reached by the class alone, and what stands in a function's by nobody. Namespaces and plain enumerations hide
    nothing.
    """
    names: set[tuple[str, bytes]] = set()
    head: list[bytes] = []  # words since the last brace or semicolon
    hides: list[bool] = []  # of each brace that is open
    for macro, using, word, mark in TOKEN.findall(_ran(f"g++ {FLAGS} -E -P -dD -x c++ /box/header.hpp", text)):
        if macro:
            names.add(("macro", macro))
        elif (using or word) and not any(hides):
            names.add(("using", using) if using else ("word", word))
        if mark == b"{":
            keys = [index for index, before in enumerate(head) if before in CLASSES]
            transparent = b"namespace" in head or b"extern" in head or (b"enum" in head and not keys)
            if keys and keys[-1] + 1 < len(head) and not transparent and not any(hides):
                names.add(("body", head[keys[-1] + 1]))
            hides.append(not transparent)
        elif mark == b"}":
            hides.pop()
        if mark:
            head = []
        elif word:
            head.append(word)
    return names


def precompile(header: str, text: bytes) -> None:
    """Add a header of this name and text to `headers_folder`, and beside it what the compiler reads instead."""
    made = _ran(f"g++ {FLAGS} -x c++-header -o /tmp/made /box/header.hpp && cat /tmp/made", text)
    _write(header, text)
    _write(f"{header}.gch", made)


def _ran(command: str, text: bytes) -> bytes:
    """What a command in the sandbox says of a header with this text; OSError if it fails."""
    outcome = run(Program(("/bin/sh", "-c", command), {"/box/header.hpp": text}), limits=PRECOMPILING)
    if not outcome.succeeded:
        raise OSError("g++ refuses it")
    return outcome.output


def _write(name: str, content: bytes) -> None:
    path = headers_folder() / name
    make_directory(path.parent)
    write_atomic(path, content)
