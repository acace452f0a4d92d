"""The command line: ``megarl train``, ``optimize``, ``eval``, ``report`` and the others.

Each command imports what it needs when it is called. The module itself imports nothing heavy, so that ``--help`` and
the first line of a run appear at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from typing import NoReturn

from megarl import __version__
from megarl.cli.arguments import Parser
from megarl.cli.comparing import add_comparing
from megarl.cli.recipes import add_recipes
from megarl.cli.runs import add_runs
from megarl.cli.stages import add_stages
from megarl.cli.training import add_training
from megarl.errors import PhaseFailed, UserError, how_to_install, print_notes
from megarl.foreign import escape

# errors of files and directories that a retry would meet again
_MISTAKES = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def run() -> NoReturn:
    """`main`, then exit without Python's finalisation, which takes half a second once torch is imported, and after an
    unexpected error waits for processes that still run."""
    code: str | int | None = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of a pipe may have ended
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed but worth a retry, 2 a mistake to correct first, 130 stopped by a signal."""
    print_notes()
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown)  # shows the usage of the command instead of that of megarl
    interrupted = []

    def interrupt(*_: object) -> None:
        interrupted.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)  # sent by schedulers
    try:
        options.command(options)
    except BaseException as error:
        # an interrupted import of an extension module may raise another exception than KeyboardInterrupt
        if interrupted or isinstance(error, KeyboardInterrupt):
            sys.exit(_print_error("interrupted; start the same command again to continue", 130))
        if isinstance(error, UserError):
            sys.exit(_print_error(error, 2))
        if isinstance(error, PhaseFailed):
            sys.exit(_print_error(error, 1))
        if isinstance(error, ModuleNotFoundError) and not (error.name or "megarl").startswith("megarl"):
            needs = f"this needs the package {error.name}; the extra train of megarl has all that its commands need"
            sys.exit(_print_error(f"{needs}: {how_to_install('train')}", 2))
        if isinstance(error, BrokenPipeError) and not _stdout_has_reader():
            sys.exit(128 + signal.SIGPIPE)  # the exit code of other programs in `megarl sql ... | head`
        if isinstance(error, OSError) and error.filename is not None:
            sys.exit(_print_error(f"{error.filename}: {error.strerror}", 2 if error.errno in _MISTAKES else 1))
        raise


def _stdout_has_reader() -> bool:
    """Whether the pipe on stdout, if it is one, is still open at its other end."""
    pipe = select.poll()
    pipe.register(1, 0)
    return not any(event & select.POLLERR for _, event in pipe.poll(0))


def _print_error(message: object, code: int) -> int:
    print(f"megarl: {escape(str(message))}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="megarl", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_training, add_comparing, add_runs, add_recipes, add_stages):
        add(commands)
    return parser
