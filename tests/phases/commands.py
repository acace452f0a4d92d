"""Commands whose exit code is known, and settings as their arguments."""

from tests.helpers import megarl


def settings(*values):
    return [part for value in values for part in ("--set", value)]


def succeed(*arguments, code=0, **options):
    result = megarl(*arguments, **options)
    assert result.returncode == code, result.stderr
    return result


def train(recipe, root, *arguments, **options):
    return succeed("train", recipe, "--run-dir", root, *arguments, **options)
