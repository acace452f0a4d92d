"""The exceptions whose messages are written for the person who runs megarl, and how a run is told to stop."""

import difflib
import signal
from collections.abc import Iterable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # of a scheduler, Ctrl-C, a lost terminal
STOPPED = 143  # exit code of a phase process that saved its work and stopped because it was told to, as after SIGTERM


class UserError(Exception):
    """A wrong recipe, missing file, unfit run directory: the command line prints the message alone and exits with 2."""


class Busy(UserError):
    """Another megarl process works on the run directory."""


class PhaseFailed(Exception):
    """A phase process failed; the message names the process, the cause and the log file. Exit code 1."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be; None if it resembles none of them."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return close[0] if close else None
