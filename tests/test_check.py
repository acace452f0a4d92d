"""Which tests `tests/check.py` chooses."""

from tests.check import ALWAYS, graph, reached

EDGES = {"low.py": set(), "high.py": {"low.py"}, "apart.py": set(), "tests/x/conftest.py": {"low.py"}}
EDGES |= {f"tests/test_{name}.py": {f"{name}.py"} for name in ("high", "low", "apart")}
EDGES |= {"tests/x/test_a.py": {"tests/x/conftest.py"}}


def test_a_change_reaches_what_imports_it_nearest_first():
    assert reached(["low.py"], EDGES) == ["tests/test_low.py", "tests/test_high.py", "tests/x/test_a.py", *ALWAYS]
    assert reached(["apart.py"], EDGES) == ["tests/test_apart.py", *ALWAYS]
    assert reached(["tests/test_low.py"], EDGES) == ["tests/test_low.py", *ALWAYS]
    assert reached(["tests/x/rows.json"], EDGES) == ["tests/x/test_a.py", *ALWAYS]


def test_the_nearest_tests_of_a_module_are_its_own():
    edges = graph()
    assert "tests/storage/metrics/test_summary.py" in reached(["megarl/storage/metrics/summary.py"], edges)[:3]
    assert "tests/rewards/test_sandbox.py" in reached(["csrc/sandbox/main.c"], edges)
    assert "tests/phases/test_restart.py" in reached(["megarl/phases/optimize.py"], edges)  # imported by name


def test_a_change_of_any_module_reaches_tests():
    edges = graph()
    modules = [file for file in edges if file.startswith("megarl/") and not file.endswith("__main__.py")]
    assert [module for module in modules if set(reached([module], edges)) <= set(ALWAYS)] == []
