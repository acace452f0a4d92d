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
from tests.helpers import ROOT

RECIPE = ROOT / "examples/quickstart/recipe.toml"


@pytest.mark.parametrize(("begun", "word"), [(False, "starting"), (True, "continuing")])
@pytest.mark.parametrize("command", ["train", "rollout", "optimize"])
def test_the_first_line_comes_before_torch(tmp_path, command, begun, word):
    """The process ends at its first import of torch, without flushing what it has printed."""
    fake, run = tmp_path / "fake/torch.py", tmp_path / "run"
    fake.parent.mkdir()
    fake.write_text("import os\nos._exit(77)\n")
    if begun:
        run.mkdir()
        (run / "recipe.toml").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    arguments = ["train", RECIPE, "--run-dir", run] if command == "train" else [command, run, "--stage", "0"]
    result = subprocess.run(
        [sys.executable, "-m", "megarl.cli", *map(str, arguments)],
        env=environment | {"PYTHONPATH": str(fake.parent)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (77, f"megarl {megarl.__version__}: {word} {run}\n"), result.stderr


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert megarl.__version__ == project["version"]


def cli(*arguments):
    command = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_no_error_message_controls_the_terminal(tmp_path):
    (tmp_path / "r.toml").write_text('[run]\n"\\u001b[2J\u202e" = 1\n')
    for arguments in (["plan", tmp_path / "r.toml"], ["plan", tmp_path / "\x1b[2J\u202e"]):
        result = cli(*arguments)
        assert result.returncode == 2 and "\x1b" not in result.stderr and "\u202e" not in result.stderr
        assert "\\x1b[2J\\u202e" in result.stderr


def test_the_version_is_printed():
    assert cli("--version").stdout == f"megarl {megarl.__version__}\n"


def test_a_pipe_that_the_reader_has_closed_causes_no_error_message(tmp_path):
    """As in `megarl ... | head`; here the reader has closed the pipe before anything is written."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-u", "-m", "megarl.cli", "runs", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "command", [("train", "x", "--run-dir", "y"), ("stage", "pack", "x", "0", "y", "--license", "z")]
)
def test_an_unknown_option_shows_the_usage_of_its_command(command):
    result = cli(*command, "--zzz")
    name = " ".join(command[: 1 + (command[0] == "stage")])
    assert result.returncode == 2
    assert result.stderr.startswith(f"usage: megarl {name} ")
    assert result.stderr.endswith("unrecognized arguments: --zzz\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("sampels", "x"), "samples"),
        (("stage", "pakc"), "pack"),
        (("samples", "x", "--tokens", "ratios"), "ratio"),
        (("samples", "x", "--fininsh=stop"), "--finish"),
    ],
)
def test_the_error_for_a_misspelt_command_or_option_names_the_nearest(typed, meant):
    with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()) as told:
        main(list(typed))
    assert end.value.code == 2 and told.getvalue().endswith(f"did you mean {meant}?\n")


def test_an_unknown_key_is_looked_for_in_all_tables():
    assert "did you mean optimizer.lr?" in cli("data", "show", RECIPE, "--set", "lr=3").stderr
    assert (
        "actor.lr: unknown key; did you mean optimizer.lr?" in cli("data", "show", RECIPE, "--set", "actor.lr=3").stderr
    )
    assert "did you mean optimizer.betas?" in cli("data", "show", RECIPE, "--set", "beta=3").stderr


def test_every_command_is_in_the_list_of_commands():
    names = re.findall(r"(?m)^    ([a-z][\w-]*)(?= |$)", cli("--help").stdout)
    page = (ROOT / "docs/commands.md").read_text()
    assert {"train", "stage", "audit"} <= set(names)
    assert [name for name in names if f"megarl {name}" not in page] == []
