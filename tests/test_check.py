"""Which tests `tests/check.py` chooses."""

from __future__ import annotations

from tests.check import ALWAYS, graph, reached


def test_a_change_reaches_the_tests_that_import_it_nearest_first():
    edges = graph()
    assert reached(["tests/test_linux.py"], edges) == ["tests/test_linux.py", *ALWAYS]
    assert reached(["megarl/linux.py"], edges)[0] == "tests/test_linux.py"
    assert reached(["tests/rewards/scorers.jsonl"], edges)[0].startswith("tests/rewards/")
    assert "tests/storage/metrics/test_summary.py" in reached(["megarl/storage/metrics/summary.py"], edges)[:3]
    assert "tests/rewards/test_sandbox.py" in reached(["csrc/sandbox/main.c"], edges)
    assert "tests/phases/test_restart.py" in reached(["megarl/phases/optimize.py"], edges)  # imported by name
