"""Exceptions whose messages are written for the user of megarl, and the signals and exit code of an orderly stop."""

import difflib
import signal
from collections.abc import Iterable

# sent by a scheduler, by Ctrl-C, when a terminal is lost, by Ctrl-\
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
STOPPED = 143  # exit code of a phase process that was told to stop and saved its work first: 128 + SIGTERM


class UserError(Exception):
    """A mistake that the user can correct, such as a wrong recipe, a missing file or an unsuitable run directory.

    The command line prints the message alone, without a traceback, and exits with 2.
    """


class Busy(UserError):
    """Another megarl process holds the lock of the run directory."""


class PhaseFailed(Exception):
    """A process of a phase failed; the message names the process, the cause and the log file. Exit code 1."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be; None if it resembles none of them."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return close[0] if close else None
