"""The command line answers before anything heavy is imported."""

import os
import subprocess
import sys
import tomllib

import pytest

import megarl
from tests.helpers import ROOT

RECIPE = ROOT / "examples/quickstart/recipe.toml"


@pytest.mark.parametrize(("begun", "word"), [(False, "starting"), (True, "continuing")])
@pytest.mark.parametrize("command", ["train", "rollout", "optimize"])
def test_the_first_line_comes_before_torch(tmp_path, command, begun, word):
    """The process dies where it first imports torch, without flushing what it has printed."""
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
