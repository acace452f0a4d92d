"""A few of the random kills of ``make kills``."""

from tests.faults.kills import Laboratory


def test_runs_that_are_killed_at_random_end_as_undisturbed_ones(tmp_path):
    counts, wrong = Laboratory(tmp_path).kill(count=6, seed=5)
    assert wrong == []
    assert counts.total() == 6
