"""Exceptions whose messages are written for the user of megarl, and the signals and exit code of an orderly stop."""

import difflib
import signal
import warnings
from collections.abc import Iterable
from typing import Any

# sent by a scheduler, by Ctrl-C, when a terminal is lost, by Ctrl-\
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
STOPPED = 143  # exit code of a phase process that was told to stop and saved its work first: 128 + SIGTERM


class UserError(Exception):
    """A mistake that the user can correct, such as a wrong recipe, a missing file or an unsuitable run directory.

    The command line prints the message alone, without a traceback, and exits with 2.
    """


class Note(UserWarning):
    """A warning for the user of megarl, which `print_notes` prints without the line of megarl's source."""


class Busy(UserError):
    """Another megarl process holds the lock of the run directory."""


class PhaseFailed(Exception):
    """A process of a phase failed; the message names the process, the cause and the log file. Exit code 1."""


def how_to_install(extra: str) -> str:
    """The command that installs one of megarl's extras, for messages."""
    return f"pip install 'WHEEL[{extra}]' with a wheel of megarl, or '.[{extra}]' in a clone"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be; None if it resembles none of them."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the question "did you mean", or what is known if nothing is near."""
    close = nearest(word, known := list(known))
    return f"did you mean {close!r}?" if close else f"known are {', '.join(known)}"


def print_notes() -> None:
    """From now on print each `Note` in this process as one line of megarl."""
    default = warnings.formatwarning

    def one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
        return f"megarl: note: {message}\n" if category is Note else default(message, category, *where, **line)

    warnings.formatwarning = one_line
