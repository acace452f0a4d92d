"""``make check``: the tests that a change reaches, those of its folder and the nearest first, for five minutes at most.

A test reaches what its file imports, directly or not. What is imported by name at run time, and what is no Python, has
edges of its own (`DYNAMIC`, `OTHERS`).

    python -m tests.check [--base REV] [argument of pytest ...]     REV: where main and this branch part
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("megarl", "tests", "examples", "launch", "tools", "benchmarks", "lab")
SECONDS = 300.0
MARKS = "not vllm and not sglang and not crash and not layouts"
SLOW = ("tests/rehearsal/", "tests/gpu/", "tests/wheel/", "tests/examples/", "tests/launch/test_cluster.py")
DYNAMIC = {  # module -> start of the names of modules that it imports by name, or runs
    "megarl.phases": "megarl.phases.",
    "megarl.rollout": "megarl.rollout.",
    "megarl.cli": "megarl.phases.",
    "megarl.models": "megarl.models.families.",
    "megarl.objectives": "megarl.objectives.",
    "megarl.rewards.parts": "megarl.rewards.",
    "megarl.rewards.code": "megarl.rewards.inside.",
}
OTHERS = {  # start of a file's path -> tests
    "csrc/sandbox": ("tests/rewards/",),
    "csrc/": ("tests/kernels/",),
    "CMakeLists.txt": ("tests/kernels/",),
    "docs/": ("tests/docs/",),
    "examples/own_objective/": ("tests/objectives/test_own_file.py",),
    "examples/": ("tests/recipe/", "tests/planner/test_plan.py"),
    "lab/": ("tests/lab/",),
}
# whatever changes; they read the files of the repository
ALWAYS = ("tests/test_imports.py", "tests/test_house_rules.py")


def named_in(source: str) -> list[str]:
    """Everything that a source imports, in functions too: modules, and names in modules."""
    named: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            named += [f"{node.module}.{alias.name}" for alias in node.names]
    return named


def graph() -> dict[str, set[str]]:
    """{file: files that it imports, with the packages around them}, all relative to the root."""
    tracked = lines("git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"{p}/**.py" for p in PLACES))
    modules = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in tracked}
    files = {module: file for file, module in modules.items() if (ROOT / file).exists()}
    edges: dict[str, set[str]] = {}
    for file in files.values():
        names = [name.split(".") for name in named_in((ROOT / file).read_text())]
        prefixes = {".".join(parts[:n]) for parts in names for n in range(1, len(parts) + 1)}
        edges[file] = {files[name] for name in prefixes if name in files}
    for module, prefix in DYNAMIC.items():
        edges[files[module]] |= {file for name, file in files.items() if name.startswith(prefix)}
    for file in edges:  # pytest imports the conftest of every folder above a test; the uppermost one reaches everything
        edges[file] |= {c for p in Path(file).parents[:-2] if (c := f"{p}/conftest.py") in edges and c != file}
    return edges


def reached(changed: Iterable[str], edges: dict[str, set[str]]) -> list[str]:
    importers: dict[str, set[str]] = {}
    for file, targets in edges.items():
        for target in targets:
            importers.setdefault(target, set()).add(file)
    seen: dict[str, None] = {}
    front = dict.fromkeys([*changed, *_others(changed, edges)])
    while front:
        seen |= front
        front = dict.fromkeys(i for file in front for i in sorted(importers.get(file, ())) if i not in seen)
    tests = [file for file in seen if file in edges and re.match(r"tests/(.*/)?test_", file)]
    own = tuple(f"{Path(file).parent}/".replace("megarl/", "tests/", 1) for file in changed)
    tests.sort(key=lambda test: not test.startswith(own))
    return list(dict.fromkeys([*(file for file in tests if not file.startswith(SLOW)), *ALWAYS]))


def _others(changed: Iterable[str], edges: dict[str, set[str]]) -> Iterator[str]:
    for file in changed:
        starts = next((tests for start, tests in OTHERS.items() if file.startswith(start)), ())
        if file.endswith(".md"):
            starts = ("tests/docs/",)
        if file.startswith("tests/") and not file.endswith(".py"):  # data of the tests beside it
            starts = (f"{Path(file).parent.as_posix()}/",)
        yield from (test for test in edges if starts and test.startswith(starts))


def lines(*command: str) -> list[str]:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


class Limit:
    @pytest.hookimpl
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session, self.end = session, time.monotonic() + SECONDS

    @pytest.hookimpl
    def pytest_runtest_logreport(self) -> None:
        if time.monotonic() > self.end:
            self.session.shouldstop = f"the other tests would take longer than {SECONDS:.0f} s: make test"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV")
    options, arguments = parser.parse_known_args()
    base = options.base or lines("git", "merge-base", "HEAD", "main")[0]
    untracked = lines("git", "ls-files", "--others", "--exclude-standard")
    changed = [*lines("git", "diff", "--name-only", base), *untracked]
    tests = reached(changed, graph())
    print(f"{len(changed)} changed files reach {len(tests)} files of tests", flush=True)
    jobs = ["-n", str(os.cpu_count() or 1)]
    return pytest.main(["-q", "--as-given", "-m", MARKS, *jobs, *arguments, *tests], plugins=[Limit()])


if __name__ == "__main__":
    sys.exit(main())
