"""The commands of containers/ that need neither a GPU nor root, in folders instead of an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.helpers import ROOT

PATHS = re.compile(r"(?:(?<!\S)|(?<=[\"=]))/(src|wheels|build|opt)\b")


def commands(name: str) -> list[list[str]]:
    text = (ROOT / f"containers/{name}.Dockerfile").read_text().replace("\\\n", " ")
    stages = [re.findall(r"(?m)^RUN (?:--mount=\S+ )*(.*)$", stage) for stage in text.split("\nFROM ")[1:]]
    return [[line for line in stage if "apt-get" not in line] for stage in stages]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in place of an image's root, after the stage that builds the wheel; it has what .dockerignore admits."""
    root = tmp_path_factory.mktemp("image")
    (root / "src").mkdir()
    for name in re.findall(r"(?m)^!(.+)", (ROOT / ".dockerignore").read_text()):
        subprocess.run(["cp", "-r", ROOT / name, root / "src"], check=True)
    (root / "build").symlink_to(root)  # where the last stage sees the first one
    venv.create(root / "python", with_pip=True)  # that of the base
    for command in commands("ngc")[0]:  # builds as the others do: tests/test_containers.py
        run(root, command.replace("MEGARL_CUDA=ON", "MEGARL_CUDA=OFF"))  # nvcc takes minutes
    return root


def run(image: Path, command: str) -> str:
    command = PATHS.sub(rf"{image}/\1", command).replace("--no-cache-dir", "--dry-run --no-deps")
    environment = os.environ | {"PATH": f"{image}/opt/venv/bin:{image}/python/bin:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-ec", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_environment_gets_the_wheel(image: Path) -> None:
    for name, environments in {"vllm": 1, "sglang": 2, "ngc": 1}.items():
        shutil.rmtree(image / "opt", ignore_errors=True)
        said = [run(image, command) for command in commands(name)[1]]
        assert "".join(said).count("Would install megarl-core-") == environments, said
