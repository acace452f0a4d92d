"""Precompiles standard headers of C++ once per machine and compiler, and chooses the one that a program can use.

GCC uses a precompiled header only if its include is the first thing in a program and the compiler and its options are
the same; otherwise it reads the header's text as usual. So every program that compiles with a precompiled header would
also compile without.

Reading the precompiled ``<bits/stdc++.h>`` takes longer than the rest of most programs, so a second, smaller one
(`COMMON`) has only the headers that most programs need. It replaces the whole one if that makes no difference: if the
program contains no name that only the whole one declares, neither as a use nor as a name of its own.
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
HEADERS = (WHOLE, "iostream")  # if a program includes both, the first, which contains the other, is used
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
# declared by both, but less complete in `COMMON`: aliases of classes that only `WHOLE` defines, overloads for streams,
# and internals of the library
LESS = {b"pmr", b"uniform_int_distribution", b"__detail"}
MODULE = Path(__file__).read_bytes()  # part of the cache key: another version may make other headers or names
INSIDE = "/headers"  # the folder in the sandbox where the compiler finds the output of `precompile`
PRECOMPILING = Limits(seconds=120, memory=4 << 30, output=1 << 30, file_size=1 << 30, disk=1 << 30, forks=True)
# The beginning of a program before which nothing but standard headers is included: these may come in any order, and
# twice, but anything else before one may change its meaning (a comment that ends with \\ continues on the next line).
BEGINNING = re.compile(rb"(?:\s+|//[^\n\\]*\n|#[ \t]*include[ \t]*<[a-z_/+.0-9]+>[ \t\r]*(?://[^\n\\]*)?\n)*")
INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*<([a-z_/+.0-9]+)>", re.MULTILINE)
WORD = re.compile(rb"[A-Za-z_][A-Za-z_0-9]*")
NUMBER = re.compile(rb"(?<!\w)\.?[0-9](?:[eEpP][+-]|[\w.'])*")
SUFFIXES = (b"h", b"min", b"s")  # ends of the literals of <chrono>, which are names as well
# Text that makes the search for names unreliable: joined tokens or lines, imports, user-defined literals, and functions
# of <cmath> called as templates, which are ambiguous with the overloads of <valarray>
UNSURE = re.compile(
    rb"##|%:%:|\\[^\S\n]*\n|\bimport\b|\boperator\s*\""
    rb"|\b(?:abs|a?(?:cos|sin|tan)h?|atan2|exp|log|log10|pow|sqrt)\s*<\s*\w"
)
# Tokens of a preprocessed header. Groups: the name of a macro; a name that a using-declaration brings into a namespace;
# a word that is not a member of something; a brace or a semicolon
TOKEN = re.compile(
    rb"""^\#define[ ](\w+).*
    | (?:u8|[uUL])?"(?:[^"\\\n]|\\.)*"\w* | (?:u8|[uUL])?'(?:[^'\\\n]|\\.)*' | \.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.'])*
    | \busing\s+\w*(?:\s*::\s*\w+)*\s*::\s*(\w+) | \w*(?:\s*(?:::|\.|->)\s*\w+)+ | ([A-Za-z_]\w*) | ([{};])""",
    re.MULTILINE | re.VERBOSE,
)
CLASSES = {b"class", b"struct", b"union"}
KEYWORDS = {b"const_cast", b"reinterpret_cast", b"static_cast", b"typename", b"void"}


def options(source: bytes) -> tuple[str, dict[str, str]]:
    """The compiler's options to use a precompiled header for a program, and the folders to bind for it.

    The folders map a path outside the sandbox to the path inside; both are empty if no header can be used.
    """
    header, folder = header_of(source), headers_folder()
    if header is None or not (folder / f"{header}.gch").is_file():
        return "", {}
    use = f"-include {INSIDE}/{header}"
    if header == WHOLE and (folder / f"{COMMON}.gch").is_file() and needs_common_alone(source, folder):
        use = f"-I {INSIDE}/common -include {INSIDE}/{COMMON}"  # in this folder <bits/stdc++.h> is `COMMON`
    return use, {str(folder): INSIDE}


def header_of(source: bytes) -> str | None:
    """The one of `HEADERS` that a program includes before anything but standard headers; None if there is none."""
    beginning = BEGINNING.match(source)
    names = INCLUDE.findall(beginning.group() if beginning else b"")
    return next((header for header in HEADERS if header.encode() in names), None)


def needs_common_alone(source: bytes, folder: Path) -> bool:
    """Whether the program means the same with `COMMON` as with `WHOLE`; False in case of doubt."""
    includes, rest = [name.decode() for name in INCLUDE.findall(source)], _rest(folder)
    if len(includes) < source.count(b"include") or not {WHOLE, *COMMON_HEADERS}.issuperset(includes):
        return False
    if UNSURE.search(source) or any(number.endswith(SUFFIXES) for number in NUMBER.findall(source)):
        return False
    return rest is not None and rest.isdisjoint(WORD.findall(INCLUDE.sub(b"", source)))


def _rest(folder: Path) -> frozenset[bytes] | None:
    """The names in the file `REST`; None if it is missing or damaged."""
    with contextlib.suppress(UserError):
        return _read_rest(folder / REST)
    return None


@functools.cache
def _read_rest(path: Path) -> frozenset[bytes]:
    return frozenset(name.encode() for name in read_checked(path, "", needs_checksum=True)["names"])


def headers_folder() -> Path:
    """The folder for the headers of this compiler and this version of the module, in the user's cache."""
    cache = Path(os.environ.get("MEGARL_CACHE") or "~/.cache/megarl").expanduser()
    state = COMPILER.resolve().stat()
    version = f"{state.st_size} {state.st_mtime_ns} ".encode() + MODULE
    return cache / f"headers-{hashlib.sha256(version).hexdigest()[:16]}"


def make_headers() -> None:
    """Precompile `TEXTS` if this machine has not done so. Failures are only printed: programs then compile slower."""
    folder = headers_folder()
    for header, text in TEXTS.items():
        if not _is_made(header, folder):
            try:
                with _locked(folder):
                    if not _is_made(header, folder):
                        _make(header, text.encode())
            except (OSError, UserError, PhaseFailed) as error:
                print(f"C++ programs will compile slower, without a precompiled {header}: {error}", file=sys.stderr)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from adding headers: two that write the same file could leave half of it."""
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
    """A superset of what a header with this text declares, as (kind, name): all words outside of bodies.

    Kinds: "macro", "using", "body" (a class is defined, not only declared), "word". Names in the body of a class can be
    reached only through the class, and names in a function's body not at all, so both are left out. Namespaces and
    plain enumerations hide nothing.
    """
    names: set[tuple[str, bytes]] = set()
    head: list[bytes] = []  # words since the last brace or semicolon
    hides: list[bool] = []  # for each open brace: whether it hides the names in it
    for macro, using, word, mark in TOKEN.findall(_run_gcc(f"g++ {FLAGS} -E -P -dD -x c++ /box/header.hpp", text)):
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
    """Write a header of this name and text, and its precompiled form ``.gch`` beside it, into `headers_folder`."""
    compiled = _run_gcc(f"g++ {FLAGS} -x c++-header -o /tmp/made /box/header.hpp && cat /tmp/made", text)
    _write(header, text)
    _write(f"{header}.gch", compiled)


def _run_gcc(command: str, text: bytes) -> bytes:
    """The output of a shell command in the sandbox, in which /box/header.hpp has this text; OSError if it fails."""
    outcome = run(Program(("/bin/sh", "-c", command), {"/box/header.hpp": text}), limits=PRECOMPILING)
    if not outcome.succeeded:
        raise OSError("g++ cannot compile it in the sandbox")
    return outcome.output


def _write(name: str, content: bytes) -> None:
    path = headers_folder() / name
    make_directory(path.parent)
    write_atomic(path, content)
