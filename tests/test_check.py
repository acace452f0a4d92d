"""Which tests `tests/check.py` chooses."""

from tests.check import ALWAYS, chosen


def test_those_beside_a_change_come_first_and_then_those_that_import_it():
    found = chosen(["megarl/storage/metrics/summary.py", "csrc/sandbox/main.c"])
    assert found[0].startswith("tests/storage/metrics/") and found[-len(ALWAYS) :] == list(ALWAYS)
    assert found.index("tests/rewards/test_sandbox.py") < found.index("tests/phases/test_parts.py")
    assert "tests/planner/test_plan.py" not in found
