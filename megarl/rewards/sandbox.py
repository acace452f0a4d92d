"""Runs untrusted programs, each in Linux namespaces of its own and without privileges.

A program sees a read-only tree of compilers, libraries and one Python without packages, its own files, and a private
/tmp; no home, /proc, network or other processes. Only listed system calls are allowed, none of which can create a
socket, process or namespace. Its resources are limited, and when it ends or is stopped, the kernel kills everything
that it started. The launcher in `csrc/sandbox` does this.

Its output is read here, outside. `SandboxError` means that the sandbox failed, which says nothing about the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megarl import compiled_file
from megarl.errors import UserError

POLL_SECONDS = 0.5  # between two checks of a program that writes nothing
PYTHON = "/python/bin/python"  # path inside the sandbox, unless megarl runs on the system's Python
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # so that no score depends on the order of a set
    "OMP_NUM_THREADS": "1",
}
Result = TypeVar("Result")
DEVICES = ("null", "zero", "full", "random", "urandom")


class SandboxError(RuntimeError):
    """The sandbox itself failed. This is an error of the run and never affects a score."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program."""

    seconds: int = 6  # CPU time
    asleep: float = 10.0  # seconds in which it neither ran nor waited for a CPU, but for example for memory or input
    memory: int = 1 << 30  # bytes of address space, of each process if there may be several
    output: int = 4 << 20  # bytes of standard output
    file_size: int = 64 << 20  # bytes of the largest file
    disk: int = 64 << 20  # bytes of all its files in /tmp, which is in memory
    files: int = 1024
    open_files: int = 64
    threads: int = 64
    forks: bool = False  # whether it may start processes, as compilers must

    @property
    def wall(self) -> int:
        """Seconds of wall-clock time after which it is stopped, even if it has got only a hundredth of a CPU."""
        return 100 * self.seconds + int(self.asleep) + 1


@dataclass(frozen=True)
class Program:
    """A command to run in the sandbox, and what it finds there.

    files: absolute name inside -> content; they are readable and executable. binds: additional read-only folders, path
    outside -> path inside.
    """

    command: tuple[str, ...]
    files: dict[str, bytes]
    binds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    over: str | None  # the limit that it exceeded: "time" | "asleep" | "memory" | "output"; None: it ended by itself
    code: int  # exit status, or minus the number of the signal that ended it
    output: bytes  # its standard output, at most `Limits.output` bytes
    seconds: float = 0.0  # in which it ran or, for longer than a moment, did not even wait for a processor

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit status 0."""
        return self.over is None and self.code == 0


def python_command(*arguments: str) -> tuple[str, ...]:
    """The command that runs Python in the sandbox; it can import only the standard library."""
    return (python_of()[0], "-s", "-P", "-B", *arguments)


def run(program: Program, stdin: bytes = b"", limits: Limits = Limits()) -> Outcome:
    """Run a program to its end, `twice` if need be."""

    def once() -> Outcome:
        with _sealed(stdin) as source, Run(program, limits, source) as running:
            return running.finish()

    return twice(once)


def twice(attempt: Callable[[], Result]) -> Result:
    """The result of ``attempt``. If the sandbox fails, it is made once more; then `SandboxError` is raised."""
    try:
        return attempt()
    except SandboxError:
        return attempt()


@functools.cache
def check_sandbox() -> None:
    """Raise `UserError`, with a remedy, if this machine cannot run programs in a sandbox."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise UserError(
            "programs cannot be run in a sandbox here: /proc has no files task/*/children, which need a kernel with "
            "CONFIG_PROC_CHILDREN"
        )
    launcher()
    try:
        outcome = run(Program(python_command("-c", "print(6 * 7)"), {}))
    except SandboxError as error:
        raise UserError(
            f"programs cannot be run in a sandbox here ({error}), and they are never run without one. On your own "
            "machine allow user namespaces (sysctl user.max_user_namespaces, and on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0); in a container "
            "allow user namespaces (podman, or docker --security-opt seccomp=unconfined)"
        ) from error
    if not outcome.succeeded or outcome.output != b"42\n":
        raise UserError(f"Python does not run in the sandbox of this machine: {outcome}")


@functools.cache
def launcher() -> Path:
    """The compiled launcher; `UserError` with the remedy if it is not installed."""
    path = compiled_file("rewards/bin/megarl_sandbox")
    if path is None:
        raise UserError(
            "the sandbox's compiled launcher is missing, because megarl was installed without a C++ compiler: install "
            "one, then megarl again (pip install . in its clone), or install its wheel"
        )
    return path


class Run:
    """A running program. Used as a context manager it kills all that is left of the program at the end."""

    def __init__(self, program: Program, limits: Limits, stdin: int, stdout: int | None = None) -> None:
        """Start it. stdin, stdout: file descriptors; without ``stdout`` the output is returned by `finish`."""
        self.limits, self._output, self._status_text = limits, bytearray(), b""
        self._stopped: str | None = None  # the reason given to `stop`
        self._busy_seconds = 0.0  # the largest result of `_busy` so far
        self._asleep = 0.0  # seconds in which it neither ran nor waited for a CPU, when last looked at
        self._begin = time.monotonic()
        output, output_end = os.pipe() if stdout is None else (None, stdout)
        self._status, status_end = os.pipe()
        self._ends = [end for end in (self._status, output) if end is not None]
        self._stdout = output
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, status_end)
            if stdout is None:
                stack.callback(os.close, output_end)
            contents = [stack.enter_context(_sealed(content)) for content in program.files.values()]
            command = _command(program, limits, status_end, contents)
            self._supervisor = subprocess.Popen(
                command, stdin=stdin, stdout=output_end, stderr=subprocess.DEVNULL, env={}, cwd="/",
                pass_fds=[status_end, *contents],
            )  # fmt: skip

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._supervisor.wait()
        for end in self._ends:
            os.close(end)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the program ends."""
        return self._status

    def stop(self, why: str = "stopped") -> None:
        """Ask the launcher to kill it and everything that it started. why: the limit that it exceeded, if it did."""
        self._stopped = self._stopped or why
        with contextlib.suppress(ProcessLookupError):
            self._supervisor.send_signal(signal.SIGTERM)

    def finish(self) -> Outcome:
        """Wait for its end, which its limits guarantee; `SandboxError` if it is not known how it ended."""
        while self._stdout is not None or not self.ended():
            end = self._status if self._stdout is None else self._stdout
            if not select.select([end], [], [], POLL_SECONDS)[0]:
                if self.is_asleep():
                    self.stop("asleep")
            elif self._stdout is not None:
                data = os.read(self._stdout, 1 << 16)
                self._output += data
                if too_long := len(self._output) > self.limits.output:
                    self.stop("output")
                if too_long or not data:
                    self._stdout = None
        self._supervisor.wait()
        return self._outcome()

    def is_asleep(self, *others: Run) -> bool:
        """Whether it and ``others`` have neither run nor waited for a CPU for ``limits.asleep`` seconds in all."""
        busy = sum(run._busy() for run in (self, *others))
        self._asleep = time.monotonic() - self._begin - busy
        return self._asleep > self.limits.asleep

    def ended(self) -> bool:
        """Whether it and everything that it started has ended."""
        while select.select([self._status], [], [], 0)[0]:
            data = os.read(self._status, 4096)
            if not data:
                return True
            self._status_text += data
        return False

    def _busy(self) -> float:
        """Seconds in which its threads ran or waited for a CPU; the largest value seen, since ended threads vanish."""
        nanoseconds, pending = 0, [self._supervisor.pid]
        while pending:
            with contextlib.suppress(OSError):  # the process has just ended
                for task in Path(f"/proc/{pending.pop()}/task").iterdir():
                    nanoseconds += sum(map(int, (task / "schedstat").read_text().split()[:2]))
                    pending += map(int, (task / "children").read_text().split())
        self._busy_seconds = max(self._busy_seconds, nanoseconds / 1e9)
        return self._busy_seconds

    def _outcome(self) -> Outcome:
        """How it ended, by the launcher's report: "ended", "time" or "wall", wait status, CPU microseconds, memory."""
        words = self._status_text.decode(errors="replace").split()
        output = bytes(self._output[: self.limits.output])
        if words[:1] == ["failed"] or not (self._stopped or len(words) == 4):
            raise SandboxError(" ".join(words) or "its launcher was killed from outside")
        if len(words) != 4 or self._stopped == "output":
            over = None if self._stopped == "stopped" else self._stopped
            return Outcome(over, -signal.SIGKILL, output, self._busy_seconds + self._asleep)
        code = os.waitstatus_to_exitcode(int(words[1]))
        over = None
        late = int(words[2]) >= self.limits.seconds * 1_000_000  # microseconds
        if words[0] != "ended" or late or code == -signal.SIGXCPU:
            over = "time"
        elif code == -signal.SIGKILL:  # the kernel killed it because memory ran out, unless it killed itself
            over = "memory"
        return Outcome(over, code, output, int(words[2]) / 1e6 + self._asleep)


@contextlib.contextmanager
def _sealed(content: bytes) -> Iterator[int]:
    """A descriptor of a read-only file in memory with this content."""
    descriptor = os.memfd_create("program", os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


@functools.cache
def python_of(prefix: Path = Path(sys.base_prefix)) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """For a Python installed at ``prefix``: its path inside, binds (outside -> inside), folders inside to hide."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix == Path("/usr"):
        return f"/usr/bin/{version}", {}, ()
    binds = {str((prefix / "bin" / version).resolve()): PYTHON, str((prefix / "lib").resolve()): "/python/lib"}
    return PYTHON, binds, (f"/python/lib/{version}/site-packages",)


@functools.cache
def _tree() -> tuple[dict[str, str], dict[str, str]]:
    """The parts of the system that every program sees: binds (path outside -> inside) and links (name -> target)."""
    binds, links = {"/usr": "/usr"}, {}
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            links[name] = os.readlink(name)
        elif os.path.isdir(name):
            binds[name] = name
    others = ("/etc/ld.so.cache", "/etc/alternatives", *(f"/dev/{device}" for device in DEVICES))
    return binds | {name: name for name in others if os.path.exists(name)}, links


def _command(program: Program, limits: Limits, status: int, contents: list[int]) -> list[str]:
    python, python_binds, hidden = python_of()
    environment = dict(ENVIRONMENT)
    if python == PYTHON:
        environment |= {"PYTHONHOME": "/python", "LD_LIBRARY_PATH": "/python/lib"}
    binds, links = _tree()
    files = zip(program.files, contents, strict=True)
    return [
        str(launcher()), f"parent={os.getpid()}", f"status={status}", f"seconds={limits.seconds}",
        f"wall={limits.wall}", f"memory={limits.memory}", f"processes={limits.threads}",
        f"open_files={limits.open_files}", f"file_size={limits.file_size}", f"tmp_size={limits.disk}",
        f"tmp_files={limits.files}", f"forks={int(limits.forks)}",
        *(f"env={name}={value}" for name, value in environment.items()),
        *(f"bind={outside}:{inside}" for outside, inside in (binds | python_binds | program.binds).items()),
        *(f"link={target}:{name}" for name, target in links.items()),
        *(f"hide={name}" for name in hidden),
        *(f"file={content}:{name}" for name, content in files),
        "--", *program.command,
    ]  # fmt: skip
