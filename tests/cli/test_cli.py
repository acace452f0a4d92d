"""The command line: its first line of output, versions, and its answers to mistakes."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest

import megarl
from megarl.cli import main
from tests.helpers import ROOT, refused

RECIPE = ROOT / "examples/quickstart/recipe.toml"


@pytest.mark.parametrize(
    ("command", "begun", "word"),
    [("train", False, "starting"), ("train", True, "continuing"), ("rollout", True, "continuing")],
)
def test_the_first_line_comes_before_torch(tmp_path, command, begun, word):
    """The process ends at its first import of torch, without flushing what it has printed."""
    fake, run = tmp_path / "fake/torch.py", tmp_path / "run"
    fake.parent.mkdir()
    fake.write_text("import os\nos._exit(77)\n")
    if begun:
        run.mkdir()
        (run / "recipe.toml").touch()
    environment = os.environ | {"PYTHONPATH": str(fake.parent)}
    environment.pop("PYTHONUNBUFFERED", None)
    arguments = ["train", RECIPE, "--run-dir", run] if command == "train" else [command, run, "--stage", "0"]
    started = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
    result = subprocess.run(started, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (77, f"megarl {megarl.__version__}: {word} {run}\n"), result.stderr


def printed(*arguments):
    with pytest.raises(SystemExit, match="^0$"), contextlib.redirect_stdout(io.StringIO()) as told:
        main(list(arguments))
    return told.getvalue()


def test_no_error_message_controls_the_terminal(tmp_path):
    (tmp_path / "r.toml").write_text('[run]\n"\\u001b[2J\u202e" = 1\n')
    for path in (tmp_path / "r.toml", tmp_path / "\x1b[2J\u202e"):
        said = refused("plan", path)
        assert "\x1b" not in said and "\u202e" not in said and "\\x1b[2J\\u202e" in said


def test_the_version_is_printed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert printed("--version") == f"megarl {megarl.__version__}\n" and project["version"] == megarl.__version__


def test_a_pipe_that_the_reader_has_closed_causes_no_error_message(tmp_path):
    """As in `megarl ... | head`; here the reader has closed the pipe before anything is written."""
    read, write = os.pipe()
    os.close(read)
    command, environment = [sys.executable, "-u", "-m", "megarl.cli", "init"], os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("sampels", "x"), "did you mean 'samples'?"),
        (("samples", "x", "--tokens", "ratios"), "did you mean 'ratio'?"),
        (("samples", "x", "--promtp=1"), "did you mean --prompt?"),
        (("data", "show", RECIPE, "--set", "lr=3"), "did you mean optimizer.lr?"),
    ],
)
def test_the_error_for_a_misspelt_word_names_the_nearest(typed, meant):
    assert meant in refused(*typed)


def test_every_command_is_in_the_list_of_commands():
    names = re.findall(r"(?m)^    ([a-z][\w-]*)(?= |$)", printed("--help"))
    page = (ROOT / "docs/commands.md").read_text()
    assert {"train", "stage", "audit"} <= set(names)
    assert [name for name in names if f"megarl {name}" not in page] == []
