"""Which tests `tests/check.py` chooses."""

from __future__ import annotations

from tests.check import ALWAYS, graph, reached

EDGES = {
    "megarl/low.py": set(),
    "megarl/high.py": {"megarl/low.py"},
    "megarl/apart.py": set(),
    "tests/x/conftest.py": {"megarl/low.py"},
    "tests/x/test_a.py": {"tests/x/conftest.py"},
    "tests/test_high.py": {"megarl/high.py"},
    "tests/test_low.py": {"megarl/low.py"},
    "tests/test_apart.py": {"megarl/apart.py"},
}


def test_a_change_reaches_what_imports_it_nearest_first():
    assert reached(["megarl/low.py"], EDGES) == [
        "tests/test_low.py",
        "tests/test_high.py",
        "tests/x/test_a.py",
        *ALWAYS,
    ]
    assert reached(["megarl/apart.py"], EDGES) == ["tests/test_apart.py", *ALWAYS]
    assert reached(["tests/test_low.py"], EDGES) == ["tests/test_low.py", *ALWAYS]
    assert reached(["tests/x/rows.json"], EDGES) == ["tests/x/test_a.py", *ALWAYS]


def test_the_nearest_tests_of_a_module_are_its_own():
    edges = graph()
    assert reached(["megarl/rewards/math.py"], edges)[:2] == [
        "tests/data/test_formats.py",
        "tests/rewards/test_math.py",
    ]
    assert "tests/storage/metrics/test_summary.py" in reached(["megarl/storage/metrics/summary.py"], edges)[:3]
    assert "tests/rewards/test_sandbox.py" in reached(["csrc/sandbox/main.c"], edges)
    assert "tests/phases/test_restart.py" in reached(["megarl/phases/optimize.py"], edges)  # imported by name
