"""``megarl completion`` in bash, zsh and fish: how the shells themselves complete a line."""

import contextlib
import io
import os
import pty
import re
import select
import shutil
import subprocess

import pytest

from megarl.cli import main

CASES = [
    ("tr", ["trace", "train"]),
    ("stage pa", ["pack"]),
    ("stage pack --l", ["--license"]),
    ("serve --po", ["--port"]),
    ("samples data --to", ["--tokens"]),  # a run directory with the name of a command
    ("plan words.", ["words.toml"]),
]
# (what is typed, how its last word is completed) of the cases with one match, which a shell inserts at once
ONE = [(typed, completed[0]) for typed, completed in CASES if len(completed) == 1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "words.toml").touch()
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(["completion", shell])
        (tmp_path / shell).write_text(printed.getvalue())
    return tmp_path


def required(shell):
    if shutil.which(shell) is None:
        why = f"{shell} is not installed"
        pytest.fail(why) if os.environ.get("MEGARL_REQUIRE_SHELLS") == "1" else pytest.skip(why)


def run(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(("typed", "completed"), CASES)
def test_completion_in_bash(folder, typed, completed):
    words = ["megarl", *typed.split()]
    asked = (
        f"source ./bash; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _megarl; echo ${{COMPREPLY[@]}}"
    )
    assert sorted(run(folder, "bash", "-c", asked)) == completed


@pytest.mark.parametrize(("typed", "completed"), CASES)
def test_completion_in_fish(folder, typed, completed):
    required("fish")
    asked = f"source ./fish; complete -C 'megarl {typed}'"
    assert run(folder, "fish", "--no-config", "-c", asked) == completed


def test_completion_in_zsh(folder):
    """On a terminal: Tab completes the line, and Enter runs it with a `megarl` that prints its arguments."""
    required("zsh")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ["TERM"] = "dumb"
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        begin = 'autoload -Uz compinit; compinit -u -D; eval "$(<zsh)"; megarl() { print "<$*>" }; print "<"begun">"\n'
        os.write(terminal, begin.encode())
        assert answer(terminal) == "begun"
        for typed, word in ONE:
            os.write(terminal, f"megarl {typed}\t\r".encode())
            assert answer(terminal).split() == [*typed.split()[:-1], word]
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def answer(terminal):
    """What is printed in angle brackets next; fails if nothing is printed for a minute."""
    seen = ""
    while not (found := re.search(r"\n<(.*)>", seen)):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, f"nothing follows {seen!r}"
        seen += os.read(terminal, 4096).decode()
    return found[1]
