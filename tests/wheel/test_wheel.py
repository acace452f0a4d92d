"""The wheel in an environment with neither a compiler nor a clone: first alone, then with its extra ``train``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, broken_links

Command = Callable[..., subprocess.CompletedProcess[str]]
FIRST_LOSS = """
import megarl, torch
from megarl.objectives import build_objective, padded_terms

logprobs, old, mask = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3), torch.ones(2, 3).bool()
padded_terms(build_objective("m2po", {}), logprobs, old, torch.tensor([1.0, -1.0]), mask).loss.sum().backward()
print(megarl.__file__, logprobs.grad.abs().sum().item() > 0)
"""
INSTALL = ("python", "-m", "pip", "install", "-q", "-c", f"{ROOT}/constraints.txt", "--find-links", f"{ROOT}/dist")


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Without CUDA kernels, which take a minute and have no use here."""
    environment = os.environ | {"SKBUILD_CMAKE_DEFINE": "MEGARL_CUDA=OFF"}
    subprocess.run([sys.executable, "tools/make_wheel.py"], cwd=ROOT, env=environment, check=True, timeout=600)
    return next((ROOT / "dist").glob("megarl_core-*.whl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def run(wheel: Path, folder: Path) -> Command:
    """Runs a program of the environment in a folder of its own; nothing but that environment is on PATH."""
    venv.create(folder / "env", with_pip=True)
    environment = {"PATH": f"{folder}/env/bin", "HOME": str(folder)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def call(program: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "env/bin" / program), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    for requirement in ("torch", wheel):  # torch alone: the small CPU build is taken where pip finds one
        call(*INSTALL, str(requirement))
    return call


@pytest.fixture(scope="module")
def trained(run: Command, wheel: Path) -> Command:
    run(*INSTALL, f"{wheel}[train]")
    return run


def test_the_wheel_is_for_many_distributions_and_its_links_lead_somewhere(wheel: Path, tmp_path: Path) -> None:
    assert re.fullmatch(r"megarl_core-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    assert len(list((ROOT / "dist").glob("megarl_core-*.tar.gz"))) == 1
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert broken_links(list(tmp_path.rglob("*.md"))) == []


def test_objectives_need_torch_and_numpy_alone(run: Command, folder: Path) -> None:
    installed = {package["name"] for package in json.loads(run("python", "-m", "pip", "list", "--format=json").stdout)}
    assert installed & {"transformers", "pydantic", "megatron-core"} == set()
    path, has_gradient = run("python", "-c", FIRST_LOSS).stdout.split()
    assert Path(path).is_relative_to(folder)
    assert has_gradient == "True"


def test_a_command_without_its_packages_names_the_extra(run: Command, folder: Path) -> None:
    (folder / "recipe.toml").write_text("")
    message = run("megarl", "train", "recipe.toml", "--run-dir", "run", code=2).stderr
    assert re.fullmatch(r"megarl: this needs the package [\w.]+; the extra train .*\[train\].*\n", message)


def test_the_quickstart_is_trained_and_reported(trained: Command, folder: Path) -> None:
    script = next((folder / "env/lib").glob("python*/site-packages/megarl")) / "examples/quickstart/run.py"
    done = trained("python", str(script), "--set", "schedule.stages=1")
    assert re.search(r"accuracy|\+0?\.\d", done.stdout), done.stdout
    assert (folder / "runs/quickstart/final/model.safetensors").exists()
    trained("megarl", "report", "runs/quickstart", "--output", "report.html")
    assert (folder / "report.html").stat().st_size > 10_000
    assert "'WHEEL[sql]'" in trained("megarl", "sql", "runs/quickstart", "select 1", code=2).stderr


def test_init_writes_a_shipped_recipe_and_names_the_pages(trained: Command, folder: Path) -> None:
    docs = Path(trained("megarl", "init").stdout.partition("docs    ")[2].splitlines()[0])
    assert (docs / "stages.md").exists() and docs.is_relative_to(folder) and (folder / "starter.toml").exists()


def test_the_doctor_finds_the_kernels_and_runs_a_program_in_the_sandbox(trained: Command, folder: Path) -> None:
    found = json.loads(trained("megarl", "doctor", "--json").stdout)
    assert found["sandbox"] == "can run programs"
    assert found["cpu kernels"].startswith(str(folder))
