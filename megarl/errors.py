"""The exceptions whose messages are written for the person who runs megarl."""

STOPPED = 143  # exit code of a phase process that saved its work and stopped because it was told to, as after SIGTERM


class UserError(Exception):
    """A wrong recipe, missing file, unfit run directory: the command line prints the message alone and exits with 2."""


class PhaseFailed(Exception):
    """A phase process failed; the message names the process, the cause and the log file. Exit code 1."""
