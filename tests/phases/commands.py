"""Commands whose exit code is known, or that are held at a file operation, and settings as their arguments."""

import psutil

from tests.helpers import megarl, start_megarl, wait_until_held


def settings(*values):
    return [part for value in values for part in ("--set", value)]


def succeed(*arguments, code=0, **options):
    result = megarl(*arguments, **options)
    assert result.returncode == code, result.stderr
    return result


def train(recipe, root, *arguments, **options):
    return succeed("train", recipe, "--run-dir", root, *arguments, **options)


def start_held(marker, pattern, count, *arguments):
    """Start `megarl`; returns it and the process that `tests.zygote.hold` holds, once there is one."""
    command = start_megarl(*arguments, hold=[pattern, count, str(marker)])
    return command, psutil.Process(wait_until_held(command, marker))
