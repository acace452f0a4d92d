"""The exceptions whose messages are written for the person who runs megarl, and how a run is told to stop."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # of a scheduler, Ctrl-C, a lost terminal
STOPPED = 143  # exit code of a phase process that saved its work and stopped because it was told to, as after SIGTERM


class UserError(Exception):
    """A wrong recipe, missing file, unfit run directory: the command line prints the message alone and exits with 2."""


class PhaseFailed(Exception):
    """A phase process failed; the message names the process, the cause and the log file. Exit code 1."""
