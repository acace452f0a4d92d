"""``make check``: the tests beside what a change touches, then those that import it, for five minutes at most.

The tests beside ``megarl/views/sql.py`` are those in ``tests/views/``.

    python -m tests.check [--base REV] [argument of pytest ...]     REV: where main and this branch part
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300.0
MARKS = "not vllm and not sglang and not crash and not layouts"
SLOW = ("tests/rehearsal/", "tests/gpu/", "tests/wheel/", "tests/examples/", "tests/launch/test_cluster.py")
# whatever changes; they read the files of the repository
ALWAYS = ("tests/test_imports.py", "tests/test_house_rules.py", "tests/docs")
OTHERS = {"csrc/sandbox": "tests/rewards/", "csrc/": "tests/kernels/", "examples/": "tests/recipe/"}


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


def chosen(changed: Iterable[str]) -> list[str]:
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    tests = {file: named_in((ROOT / file).read_text()) for file in files if not file.startswith(SLOW)}
    found: list[str] = []
    for file in changed:
        folder = next((OTHERS[start] for start in OTHERS if file.startswith(start)), f"{Path(file).parent}/")
        found += [test for test in tests if test.startswith(folder.replace("megarl/", "tests/", 1))]
    for file in changed:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found += [test for test, names in tests.items() if any(f"{name}.".startswith(f"{module}.") for name in names)]
    return list(dict.fromkeys([*found, *ALWAYS]))


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
    tests = chosen(changed)
    print(f"{len(changed)} changed files are tested by {len(tests)} files of tests", flush=True)
    jobs = ["-n", str(os.cpu_count() or 1)]
    return pytest.main(["-q", "--as-given", "-m", MARKS, *jobs, *arguments, *tests], plugins=[Limit()])


if __name__ == "__main__":
    sys.exit(main())
