"""Makes ``.venv``: a thin environment over shared, cached dependencies, with this clone installed editable.

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
MARK = VENV / ".made-by-megarl"
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def main() -> None:
    dependencies = make_dependencies(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    make_venv(dependencies)


def make_dependencies(project: dict[str, Any]) -> Path:
    """The environment that holds the dependencies at the tested versions; makes it if no earlier call did."""
    requirements = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    python = [sys.version, sys.base_prefix]
    key = hashlib.sha256(json.dumps([CONSTRAINTS.read_text(), requirements, python]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache/megarl")
    cache.mkdir(parents=True, exist_ok=True)
    environment = cache / f"env-{key}"
    with open(cache / f"env-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / ".complete").exists():
            print(f"installing the dependencies into {environment} (once, some minutes)", flush=True)
            shutil.rmtree(environment, ignore_errors=True)
            venv.create(environment, with_pip=True)
            # torch first and alone: the small CPU build is taken where pip finds one, and then nothing replaces it.
            install(environment, ["torch"], lock.fileno())
            install(environment, requirements, lock.fileno())
            (environment / ".complete").touch()
    return environment


def install(environment: Path, requirements: list[str], lock: int) -> None:
    """pip holds the lock too: it may outlive a killed parent, and must not write beside the next attempt."""
    command = [str(environment / "bin/python"), "-m", "pip", "install", "-qq", "-c", str(CONSTRAINTS), *requirements]
    subprocess.run(command, check=True, pass_fds=[lock])


def make_venv(dependencies: Path) -> None:
    """``.venv`` sees the dependencies through a .pth file, and has nothing of its own but megarl."""
    if VENV.exists() and not MARK.exists():
        sys.exit(f"{VENV} exists, but `make` did not make it; move it away, then try again")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    MARK.touch()
    venv.create(VENV, with_pip=False)
    (VENV / SITE_PACKAGES / "megarl_dependencies.pth").write_text(f"{dependencies / SITE_PACKAGES}\n")
    python = str(VENV / "bin/python")
    # A CPU build of torch cannot hand tensors to CUDA kernels, so their minute of compiling would be for nothing.
    probe = "import torch; print('AUTO' if torch.version.cuda else 'OFF')"
    cuda = subprocess.run([python, "-c", probe], check=True, text=True, capture_output=True).stdout.strip()
    command = [python, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    subprocess.run([*command, f"-Ccmake.define.MEGARL_CUDA={cuda}"], check=True)


if __name__ == "__main__":
    main()
