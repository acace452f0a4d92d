"""Runs programs that nobody trusts: each in namespaces of its own, without rights, and never outside them.

A program sees a read-only tree of compilers, libraries and one Python without packages, its own file, and a /tmp that
nobody else has; no home, no /proc, no network, no process but its own. It has a list of system calls, none of which
makes a socket, a process or a namespace. What it may use is limited, and when it ends, or is ended, the kernel ends
whatever it started. `csrc/sandbox` does that; where bubblewrap is installed and the user is not root, bubblewrap makes
the namespaces and the tree.

Its output is read here, outside. `SandboxError` means that the sandbox failed: that says nothing about the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megarl.errors import UserError

POLL_SECONDS = 0.5  # between two looks at a program that says nothing
PYTHON = "/python/bin/python"  # as programs see it, unless it is the system's
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set decides no score
    "OMP_NUM_THREADS": "1",
}
DEVICES = ("null", "zero", "full", "random", "urandom")


class SandboxError(RuntimeError):
    """The sandbox itself failed: an error of the run, and never a score."""


@dataclass(frozen=True)
class Limits:
    """Of one program."""

    seconds: int = 6  # processor time
    asleep: float = 10.0  # seconds in which it neither ran nor waited for a processor; waits for memory count
    memory: int = 1 << 30  # bytes of address space; of each process where there may be several
    output: int = 4 << 20  # bytes
    file_size: int = 64 << 20  # bytes of a file
    disk: int = 64 << 20  # bytes of all its files, which are in memory
    files: int = 1024
    open_files: int = 64
    threads: int = 64
    forks: bool = False  # whether it may start processes: compilers do

    @property
    def wall(self) -> int:
        """Seconds after which it is ended in any case: what is left of one processor in a hundred."""
        return 100 * self.seconds + int(self.asleep) + 1


@dataclass(frozen=True)
class Program:
    """What is run: ``command`` inside, where ``files`` (name inside -> content) are readable and executable.

    binds: folders (path outside -> inside) that it sees beside the system's, read-only.
    """

    command: tuple[str, ...]
    files: dict[str, bytes]
    binds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a program ended; ``over`` names the limit it exceeded, None if it ended by itself."""

    over: str | None  # "time" | "asleep" | "memory" | "output"
    code: int  # exit status; minus the signal's number
    output: bytes  # what it wrote to its standard output, at most `Limits.output` bytes

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.over is None and self.code == 0


def python_command(*arguments: str) -> tuple[str, ...]:
    """A command that runs the Python that programs see; no path but the standard library's is searched."""
    return (_python()[0], "-s", "-P", "-B", *arguments)


def run(program: Program, stdin: bytes = b"", limits: Limits = Limits()) -> Outcome:
    """Run a program to its end; `SandboxError` when the sandbox fails twice."""
    for attempt in (1, 2):
        try:
            with _sealed(stdin) as source, Run(program, limits, source) as running:
                return running.finish()
        except SandboxError:
            if attempt == 2:
                raise
    raise AssertionError


@functools.cache
def check_sandbox() -> None:
    """`UserError` with a remedy where this machine cannot run programs in a sandbox."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise UserError("programs are not run in a sandbox here: /proc lacks the children of a process")
    if not launcher().exists():
        raise UserError(f"{launcher()} is missing: install megarl where there is a C++ compiler, pip install .")
    try:
        outcome = run(Program(python_command("-c", "print(6 * 7)"), {}))
    except SandboxError as error:
        raise UserError(
            f"programs cannot be run in a sandbox here ({error}), and without one none is run. On a machine of "
            "your own allow user namespaces (sysctl user.max_user_namespaces, and on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0) or install bubblewrap (apt install bubblewrap); "
            "in a container allow them (podman, or docker --security-opt seccomp=unconfined)"
        ) from error
    if not outcome.succeeded or outcome.output != b"42\n":
        raise UserError(f"Python does not run in the sandbox of this machine: {outcome}")


@functools.cache
def launcher() -> Path:
    """The compiled launcher of the installed megarl distribution."""
    try:
        distribution = importlib.metadata.distribution("megarl")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("megarl is not installed: the sandbox needs its compiled launcher, pip install .") from None
    return Path(str(distribution.locate_file("megarl"))) / "rewards/bin/megarl_sandbox"


class Run:
    """A program that runs. As a context: at its end nothing of the program is left."""

    def __init__(self, program: Program, limits: Limits, stdin: int, stdout: int | None = None) -> None:
        """stdin, stdout: descriptors; without ``stdout`` the output is for `finish`."""
        self.limits, self._output, self._said = limits, bytearray(), b""
        self._stopped: str | None = None  # why
        self._ran = 0.0  # what `_busy` found last
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
        """Readable when the program has ended."""
        return self._status

    def stop(self, why: str = "stopped") -> None:
        """Have it ended, with everything that it started. ``why``: the limit that it exceeded, if it did."""
        self._stopped = self._stopped or why
        with contextlib.suppress(ProcessLookupError):
            self._supervisor.send_signal(signal.SIGTERM)

    def finish(self) -> Outcome:
        """Wait for its end, which its limits bring about; `SandboxError` if it is not known how it ended."""
        while self._stdout is not None or not self.ended():
            end = self._status if self._stdout is None else self._stdout
            if not select.select([end], [], [], POLL_SECONDS)[0]:
                if self.is_asleep():
                    self.stop("asleep")
            elif self._stdout is not None:
                self._read(self._stdout)
        self._supervisor.wait()
        return self._outcome()

    def is_asleep(self, *others: Run) -> bool:
        """Whether neither it nor ``others`` have run, or waited for a processor, for as long as its limit says."""
        busy = sum(run._busy() for run in (self, *others))
        return time.monotonic() - self._begin - busy > self.limits.asleep

    def ended(self) -> bool:
        """Whether nothing of it is left."""
        while select.select([self._status], [], [], 0)[0]:
            data = os.read(self._status, 4096)
            if not data:
                return True
            self._said += data
        return False

    def _read(self, stdout: int) -> None:
        data = os.read(stdout, 1 << 16)
        self._output += data
        if len(self._output) > self.limits.output:
            self.stop("output")
            self._stdout = None
        elif not data:
            self._stdout = None

    def _busy(self) -> float:
        """Seconds in which its threads ran, or waited for a processor. What has ended is not seen any more."""
        nanoseconds, pending = 0, [self._supervisor.pid]
        while pending:
            with contextlib.suppress(OSError):  # it has just ended
                for task in Path(f"/proc/{pending.pop()}/task").iterdir():
                    nanoseconds += sum(map(int, (task / "schedstat").read_text().split()[:2]))
                    pending += map(int, (task / "children").read_text().split())
        self._ran = max(self._ran, nanoseconds / 1e9)
        return self._ran

    def _outcome(self) -> Outcome:
        words = self._said.decode(errors="replace").split()
        output = bytes(self._output[: self.limits.output])
        if words[:1] == ["failed"] or not (self._stopped or len(words) == 4):
            raise SandboxError(" ".join(words) or "it was ended from outside")
        if len(words) != 4 or self._stopped == "output":
            return Outcome(None if self._stopped == "stopped" else self._stopped, -signal.SIGKILL, output)
        code = os.waitstatus_to_exitcode(int(words[1]))
        over = None
        if words[0] != "ended" or int(words[2]) >= self.limits.seconds * 1_000_000:  # microseconds
            over = "time"
        elif code == -signal.SIGKILL:  # by the kernel, unless it killed itself
            over = "memory"
        return Outcome(over, code, output)


@contextlib.contextmanager
def _sealed(content: bytes) -> Iterator[int]:
    """A descriptor of a file in memory that cannot be changed any more."""
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
def _python() -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Of the Python that programs see: its path inside, what is bound for it, and what of that is hidden."""
    return python_of(Path(sys.base_prefix))


def python_of(prefix: Path) -> tuple[str, dict[str, str], tuple[str, ...]]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix == Path("/usr"):
        return f"/usr/bin/{version}", {}, ()
    binds = {str((prefix / "bin" / version).resolve()): PYTHON, str((prefix / "lib").resolve()): "/python/lib"}
    return PYTHON, binds, (f"/python/lib/{version}/site-packages",)


@functools.cache
def _tree() -> tuple[dict[str, str], dict[str, str]]:
    """What every program sees of the system: bound folders and files, and links (name inside -> target)."""
    binds, links = {"/usr": "/usr"}, {}
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            links[name] = os.readlink(name)
        elif os.path.isdir(name):
            binds[name] = name
    others = ("/etc/ld.so.cache", "/etc/alternatives", *(f"/dev/{device}" for device in DEVICES))
    return binds | {name: name for name in others if os.path.exists(name)}, links


@functools.cache
def bubblewrap() -> str | None:
    """Its path where it is to be used. Root needs none: then the program is another user outside, too."""
    return None if os.geteuid() == 0 else shutil.which("bwrap")


def _command(program: Program, limits: Limits, status: int, contents: list[int]) -> list[str]:
    guard = [
        f"status={status}", f"seconds={limits.seconds}", f"wall={limits.wall}", f"memory={limits.memory}",
        f"processes={limits.threads}", f"open_files={limits.open_files}", f"file_size={limits.file_size}",
        f"tmp_size={limits.disk}", f"tmp_files={limits.files}", f"forks={int(limits.forks)}",
    ]  # fmt: skip
    python, python_binds, hidden = _python()
    environment = dict(ENVIRONMENT)
    if python == PYTHON:
        environment |= {"PYTHONHOME": "/python", "LD_LIBRARY_PATH": "/python/lib"}
    guard += [f"env={name}={value}" for name, value in environment.items()]
    binds, links = _tree()
    binds = binds | python_binds | program.binds
    start, files = [str(launcher()), "{mode}", f"parent={os.getpid()}"], dict(zip(program.files, contents, strict=True))
    wrap = bubblewrap()
    if wrap is None:
        start[1] = "own"
        own = [f"bind={outside}:{inside}" for outside, inside in binds.items()]
        own += [f"link={target}:{name}" for name, target in links.items()]
        own += [f"hide={name}" for name in hidden] + [f"file={end}:{name}" for name, end in files.items()]
        return [*start, *guard, *own, "--", *program.command]
    start[1] = "bubblewrap"
    inner = ["/launcher", "guard", *guard, "--", *program.command]
    outer = _bubblewrap_arguments(binds, links, hidden, files)
    return [*start, f"status={status}", "--", wrap, *outer, "--", *inner]


def _bubblewrap_arguments(
    binds: dict[str, str], links: dict[str, str], hidden: tuple[str, ...], files: dict[str, int]
) -> list[str]:
    # CAP_SYS_ADMIN, of the new user namespace, is for the guard, which mounts /tmp and drops it
    arguments = [
        "--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv",
        "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--uid", "65534", "--gid", "65534",
        "--ro-bind", str(launcher()), "/launcher", "--dir", "/tmp",
    ]  # fmt: skip
    for outside, inside in binds.items():
        arguments += ["--dev-bind" if outside.startswith("/dev/") else "--ro-bind", outside, inside]
    for name, target in links.items():
        arguments += ["--symlink", target, name]
    for name in hidden:
        arguments += ["--size", "4096", "--tmpfs", name, "--remount-ro", name]
    for name, end in files.items():
        arguments += ["--perms", "0555", "--ro-bind-data", str(end), name]
    return [*arguments, "--remount-ro", "/", "--chdir", "/"]
