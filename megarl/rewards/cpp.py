"""C++ programs: compiled in the sandbox, with the standard headers that most programs begin with compiled beforehand.

A header that is compiled already stands for the header alone: GCC uses it only where that is the first thing of a
program, under the same settings and compiler, and otherwise reads the header as ever. So no program compiles with it
that would not without.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from megarl.rewards.sandbox import Limits, Outcome, Program, run
from megarl.storage.files import make_directory, write_atomic

COMPILER = Path("/usr/bin/g++")
FLAGS = "-std=gnu++17 -O2"
HEADERS = ("bits/stdc++.h", "iostream")  # of several in a program the first one is taken, which has the others
INSIDE = "/headers"  # where a compiler in the sandbox finds what `precompile` made
COMPILING = Limits(seconds=30, memory=4 << 30, output=64 << 20, disk=128 << 20, forks=True)
PRECOMPILING = Limits(seconds=120, memory=4 << 30, output=1 << 30, file_size=1 << 30, disk=1 << 30, forks=True)
# standard headers can be read in any order, and twice; whatever else stands before one may change what it means
# (and a comment that ends with \\ takes the next line, too)
BEGINNING = re.compile(rb"(?:\s+|//[^\n\\]*\n|#[ \t]*include[ \t]*<[a-z_/+.0-9]+>[ \t\r]*(?://[^\n\\]*)?\n)*")
INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*<([a-z_/+.0-9]+)>", re.MULTILINE)


def compiled(source: bytes) -> Outcome:
    """The binary of a program as the outcome's output, where the compiler succeeded."""
    header, folder = header_of(source), headers_folder()
    made = header is not None and (folder / f"{header}.gch").is_file()
    use = f"-include {INSIDE}/{header} " if made else ""
    # gold takes a third of the time of the default linker
    linker = "-fuse-ld=gold " if Path("/usr/bin/ld.gold").exists() else ""
    command = f"g++ {FLAGS} {use}{linker}-pipe -o /tmp/program -x c++ /box/main.cpp && cat /tmp/program"
    binds = {str(folder): INSIDE} if made else {}
    return run(Program(("/bin/sh", "-c", command), {"/box/main.cpp": source}, binds), limits=COMPILING)


def header_of(source: bytes) -> str | None:
    """Which of `HEADERS` the program may begin with: one of the standard headers that it includes before all else."""
    beginning = BEGINNING.match(source)
    names = INCLUDE.findall(beginning.group() if beginning else b"")
    return next((header for header in HEADERS if header.encode() in names), None)


def headers_folder() -> Path:
    """Of this compiler and these settings, in the user's cache."""
    cache = Path(os.environ.get("MEGARL_CACHE") or "~/.cache/megarl").expanduser()
    state = COMPILER.resolve().stat()
    name = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns} {FLAGS}".encode()).hexdigest()[:16]
    return cache / f"headers-{name}"


def make_headers() -> None:
    """Compile `HEADERS` once on this machine. Without them programs are compiled as well, only not as fast."""
    for header in HEADERS:
        if not (headers_folder() / f"{header}.gch").is_file():
            try:
                precompile(header, f"#include <{header}>\n".encode())
            except OSError as error:
                print(f"C++ programs are compiled without a precompiled {header}: {error}", file=sys.stderr)


def precompile(header: str, text: bytes) -> None:
    """Add a header of this name and text to `headers_folder`, and beside it what the compiler reads instead."""
    command = f"g++ {FLAGS} -x c++-header -o /tmp/made /box/header.hpp && cat /tmp/made"
    outcome = run(Program(("/bin/sh", "-c", command), {"/box/header.hpp": text}), limits=PRECOMPILING)
    if not outcome.succeeded:
        raise OSError(f"g++ cannot precompile {header}")
    path = headers_folder() / header
    make_directory(path.parent)
    write_atomic(path, text)
    write_atomic(path.with_name(f"{path.name}.gch"), outcome.output)
