"""Compiles C++ programs in the sandbox, with standard headers that are precompiled once per machine and compiler.

GCC itself decides whether a program can use one: it must be its first include, and the compiler, its options and the
macros that matter must be the same; otherwise GCC reads the header's text as usual.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from pathlib import Path

from megarl.errors import PhaseFailed, UserError
from megarl.rewards.sandbox import Limits, Outcome, Program, run
from megarl.storage.files import make_directory, write_atomic

COMPILER = Path("/usr/bin/g++")
FLAGS = "-std=gnu++17 -O2"
HEADERS = ("bits/stdc++.h", "iostream")
INSIDE = "/headers"  # the folder in the sandbox where the compiler finds them
COMPILING = Limits(seconds=30, memory=4 << 30, output=64 << 20, disk=128 << 20, forks=True)
PRECOMPILING = Limits(seconds=120, memory=4 << 30, output=1 << 30, file_size=1 << 30, disk=1 << 30, forks=True)


def compiled(source: bytes) -> Outcome:
    """Compile and link a program. If the outcome succeeded, its output is the binary."""
    folder = headers_folder()
    use, binds = (f"-I {INSIDE}", {str(folder): INSIDE}) if folder.is_dir() else ("", {})
    # the gold linker takes a third of the default linker's time
    linker = "-fuse-ld=gold" if Path("/usr/bin/ld.gold").exists() else ""
    command = f"g++ {FLAGS} {use} {linker} -pipe -o /tmp/program -x c++ /box/main.cpp && cat /tmp/program"
    return run(Program(("/bin/sh", "-c", command), {"/box/main.cpp": source}, binds), limits=COMPILING)


def headers_folder() -> Path:
    """The folder for the precompiled headers of this compiler, in the user's cache."""
    cache = Path(os.environ.get("MEGARL_CACHE") or "~/.cache/megarl").expanduser()
    state = COMPILER.resolve().stat()
    version = f"#include_next {FLAGS} {state.st_size} {state.st_mtime_ns}"
    return cache / f"headers-{hashlib.sha256(version.encode()).hexdigest()[:16]}"


def make_headers() -> None:
    """Precompile `HEADERS` if this machine has not done so. Failures are only printed: programs then compile slower."""
    folder = headers_folder()
    try:
        make_directory(folder)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that write the same file could leave half of it
            for header in HEADERS:
                if not (folder / f"{header}.gch").is_file():
                    precompile(header, f"#include <{header}>\n")
    except (OSError, UserError, PhaseFailed) as error:
        print(f"C++ programs will compile slower, without precompiled headers: {error}", file=sys.stderr)


def precompile(header: str, text: str) -> None:
    """Write ``text``, precompiled in place of a header of this name, into `headers_folder`, and a way to the header."""
    command = f"g++ {FLAGS} -x c++-header -o /tmp/made /box/header.hpp && cat /tmp/made"
    outcome = run(Program(("/bin/sh", "-c", command), {"/box/header.hpp": text.encode()}), limits=PRECOMPILING)
    if not outcome.succeeded:
        raise OSError(f"g++ cannot compile {header} in the sandbox")
    path = headers_folder() / header
    make_directory(path.parent)
    write_atomic(path, f"#include_next <{header}>\n")
    write_atomic(path.with_name(f"{path.name}.gch"), outcome.output)
