"""What `tests/suites.py` says of tests that fail, on small files of tests."""

import subprocess

import pytest

from tests import suites
from tests.suites import GATE, SUITES, Suite, of_the_gate, run

PLUGINS = ("-p", "no:hypothesispytest", "-p", "no:anyio")  # which take long to import
FAILS_ONCE = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_suffix(".ran")
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")

def test_passes():
    with open(Path(__file__).with_suffix(".count"), "a") as file:
        file.write("ran ")
"""


@pytest.mark.parametrize(
    ("text", "jobs", "retry", "flaky"),
    [
        (FAILS_ONCE, 2, True, ["FLAKY test_small.py::test_fails_once"]),
        (FAILS_ONCE, 1, False, []),
        ("def test_fails():\n    assert False\n", 1, True, []),
        ("import does_not_exist_anywhere\n", 1, True, []),
        ("def test_crashes():\n    import os; os._exit(9)\n", 2, True, []),
    ],
)
def test_only_what_passes_when_it_runs_again_passes_and_is_said_to_be_flaky(
    tmp_path, monkeypatch, capfd, text, jobs, retry, flaky
):
    file = tmp_path / "test_small.py"
    file.write_text(text)
    monkeypatch.setattr(suites, "BUILD", tmp_path / "build")
    monkeypatch.setitem(SUITES, "small", Suite((str(file), "-c", "/dev/null", *PLUGINS), jobs=jobs))
    assert run("small", retry=retry) == bool(flaky)
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("FLAKY")] == flaky
    if flaky:  # only what failed ran again
        assert file.with_suffix(".count").read_text() == "ran "


def test_a_change_joins_the_suites_of_its_files(monkeypatch):
    changed = subprocess.CompletedProcess((), 0, "megarl/rewards/math.py\ndocs/faq.md\n")
    monkeypatch.setattr(suites.subprocess, "run", lambda *_, **__: changed)
    assert of_the_gate("some commit") == [*GATE, "hostile"]
    assert of_the_gate(None) == list(GATE)


def test_the_paths_of_suites_are_there_and_what_the_gate_may_join_installs_nothing():
    root = suites.ROOT
    assert not [name for name, suite in SUITES.items() if suite.paths and suite.packages]
    assert all((root / path).exists() for suite in SUITES.values() for path in suite.paths)
