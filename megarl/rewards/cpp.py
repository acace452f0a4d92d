"""Compiles C++ programs in the sandbox, with standard headers that are precompiled once per machine and compiler.

GCC uses a precompiled header only if its include is the first thing in a program and the compiler and its options are
the same; otherwise it reads the header's text as usual. So every program that compiles with a precompiled header would
also compile without.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from pathlib import Path

from megarl.errors import PhaseFailed, UserError
from megarl.rewards.sandbox import Limits, Outcome, Program, run
from megarl.storage.files import make_directory, write_atomic

COMPILER = Path("/usr/bin/g++")
FLAGS = "-std=gnu++17 -O2"
HEADERS = ("bits/stdc++.h", "iostream")  # if a program includes both, the first, which contains the other, is used
INSIDE = "/headers"  # the folder in the sandbox where the compiler finds them
COMPILING = Limits(seconds=30, memory=4 << 30, output=64 << 20, disk=128 << 20, forks=True)
PRECOMPILING = Limits(seconds=120, memory=4 << 30, output=1 << 30, file_size=1 << 30, disk=1 << 30, forks=True)
# The beginning of a program before which nothing but standard headers is included: these may come in any order, and
# twice, but anything else before one may change its meaning (a comment that ends with \\ continues on the next line).
BEGINNING = re.compile(rb"(?:\s+|//[^\n\\]*\n|#[ \t]*include[ \t]*<[a-z_/+.0-9]+>[ \t\r]*(?://[^\n\\]*)?\n)*")
INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*<([a-z_/+.0-9]+)>", re.MULTILINE)


def compiled(source: bytes) -> Outcome:
    """Compile and link a program. If the outcome succeeded, its output is the binary."""
    header, folder = header_of(source), headers_folder()
    use, binds = "", {}
    if header and (folder / f"{header}.gch").is_file():
        use, binds = f"-include {INSIDE}/{header}", {str(folder): INSIDE}
    # the gold linker takes a third of the default linker's time
    linker = "-fuse-ld=gold" if Path("/usr/bin/ld.gold").exists() else ""
    command = f"g++ {FLAGS} {use} {linker} -pipe -o /tmp/program -x c++ /box/main.cpp && cat /tmp/program"
    return run(Program(("/bin/sh", "-c", command), {"/box/main.cpp": source}, binds), limits=COMPILING)


def header_of(source: bytes) -> str | None:
    """The one of `HEADERS` that a program includes before anything but standard headers; None if there is none."""
    beginning = BEGINNING.match(source)
    names = INCLUDE.findall(beginning.group() if beginning else b"")
    return next((header for header in HEADERS if header.encode() in names), None)


def headers_folder() -> Path:
    """The folder for the precompiled headers of this compiler, in the user's cache."""
    cache = Path(os.environ.get("MEGARL_CACHE") or "~/.cache/megarl").expanduser()
    state = COMPILER.resolve().stat()
    version = f"{FLAGS} {state.st_size} {state.st_mtime_ns}"
    return cache / f"headers-{hashlib.sha256(version.encode()).hexdigest()[:16]}"


def make_headers() -> None:
    """Precompile `HEADERS` if this machine has not done so. Failures are only printed: programs then compile slower."""
    folder = headers_folder()
    for header in HEADERS:
        try:
            make_directory(folder)
            with open(folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that write the same file could leave half of it
                if not (folder / f"{header}.gch").is_file():
                    precompile(header, f"#include <{header}>\n".encode())
        except (OSError, UserError, PhaseFailed) as error:
            print(f"C++ programs will compile slower, without a precompiled {header}: {error}", file=sys.stderr)


def precompile(header: str, text: bytes) -> None:
    """Write a header of this name and text, and its precompiled form ``.gch`` beside it, into `headers_folder`."""
    command = f"g++ {FLAGS} -x c++-header -o /tmp/made /box/header.hpp && cat /tmp/made"
    outcome = run(Program(("/bin/sh", "-c", command), {"/box/header.hpp": text}), limits=PRECOMPILING)
    if not outcome.succeeded:
        raise OSError("g++ cannot compile it in the sandbox")
    for name, content in ((header, text), (f"{header}.gch", outcome.output)):
        path = headers_folder() / name
        make_directory(path.parent)
        write_atomic(path, content)
