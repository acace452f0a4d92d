"""The assumptions of `megarl plan`: each is an option with a unit and a range, and the plan prints it."""

import re

import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.planner.assumptions import GIB, Assumptions, assume
from tests.helpers import refused
from tests.planner.simulated import EXAMPLES

SMALL = str(EXAMPLES / "llama3_2_3b/mu_grpo.toml")


def test_options_have_units_of_their_own():
    found = assume({"mfu": 0.4, "storage": 5, "runtime_memory": 3, "engine_memory": None, "nodes": 2})
    assert found == Assumptions(mfu=0.4, storage=5e9, runtime_memory=3 * GIB)


def test_values_out_of_range_are_refused():
    for option, value, message in (
        ("mfu", 1.5, "--mfu 1.5: expected more than 0, and at most 1"),
        ("engine_start", float("nan"), "--engine-start nan: expected more than 0, and at most inf"),
    ):
        with pytest.raises(UserError, match=message):
            assume({option: value})


@pytest.mark.usefixtures("shared_counter")
def test_a_plan_uses_and_prints_given_assumptions(capsys):
    """--hbm replaces the memory of a GPU, also in the engine's share; --mfu and --mean-response are printed."""
    main(["plan", SMALL, "--mfu", "0.175", "--hbm", "100", "--mean-response", "0.25"])
    text = capsys.readouterr().out
    assert "hbm                              100.0 GiB" in text and "mfu                                  0.175" in text
    assert re.search(r"of this GPU, 95% +95\.00\n", text) and re.search(r"share of the engine +92\.00\n", text)
    assert "mean response                         0.25  of rollout.max_response_tokens" in text
    assert "--hbm 0: expected more than 0" in refused("plan", SMALL, "--hbm", 0)
