"""The estimated size of a run directory, compared with counts by hand.

`tests/phases/test_retention.py` compares it with real run directories.
"""

import pytest

from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import Assumptions
from megarl.planner.disk import disk_bytes
from megarl.recipe.load import load_recipe, override_recipe
from tests.planner.simulated import MOE, staged

HF = read_hf_config(MOE.parent)
RECIPE = staged()
PARAMETERS = 30_532_122_624
CHECKPOINT, POLICY = PARAMETERS * (2 + 4 + 4 + 4), PARAMETERS * 2
FULL = Assumptions(mean_prompt=1.0, mean_response=1.0)
RESPONSE = (2048 + 20480) * 4 + 20480 * 4
ANSWERS = (30 + 30 + 40) * 128 + (500 + 674 + 272 + 1319) * 2  # responses to all suites, in one evaluation


def disk(*settings, recipe=RECIPE, hf=HF):
    return disk_bytes(hf, override_recipe(recipe, list(settings)), PARAMETERS, FULL)


def test_sizes_of_stored_responses():
    parts = disk()
    assert parts["rollout store of all stages"] == 40 * 48 * 32 * 8 * RESPONSE
    assert parts["responses to evaluations"] == 41 * ANSWERS * RESPONSE
    assert "responses to evaluations" not in disk("eval.every=0")
    experts = 40 * 48 * 32 * 8 * (2048 + 20480) * 48 * 8  # a byte for each of 128 experts
    for hf, width in ((HF, 1), (HF | {"num_experts": 129}, 2)):
        replayed = disk("actor.routing_replay=engine", hf=hf)["rollout store of all stages"]
        assert replayed == parts["rollout store of all stages"] + experts * width


@pytest.mark.parametrize(
    ("settings", "most", "end"),
    [
        # 40 stages of one checkpoint each: that of the stage before is kept, and all policies, the last one as final/
        ([], (2, 41), (1, 41)),
        (["actor.keep_stages=99"], (40, 41), (40, 41)),
        # three checkpoints a stage: two of the stage before and two of this one are kept, the third is being written
        (["actor.checkpoint_every=16", "actor.keep_checkpoints=2"], (5, 41), (2, 41)),
        # the first policy, one of a finished stage, the current one, the next, and best/
        (["actor.keep_policies=1"], (2, 5), (1, 4)),
        (["actor.keep_policies=1", "schedule.stages=1"], (1, 2), (1, 2)),
        # four more policies at most, which wait for their evaluation, and best/
        (["eval.every_updates=12"], (2, 46), (1, 42)),
    ],
)
def test_numbers_of_checkpoints_and_policies_follow_retention(settings, most, end):
    parts = disk(*settings)
    both = parts["rollout store of all stages"] + parts["responses to evaluations"]
    assert parts["one checkpoint"] == CHECKPOINT and parts["one export"] == POLICY
    assert (parts["checkpoints at most"], parts["policies at most"]) == (most[0] * CHECKPOINT, most[1] * POLICY)
    for when, (checkpoints, policies) in (("at most", most), ("at its end", end)):
        assert parts[f"the run directory, {when}"] == both + checkpoints * CHECKPOINT + policies * POLICY


def test_policies_within_a_stage_of_a_live_run_are_counted():
    """MinPRO's recipe exports a version every 16 updates, of which three exist at a time.

    With eval.every_updates = 64, those after 64 and 128 of a stage's 160 updates wait for their evaluation too.
    """
    live = load_recipe(MOE)
    exported = ["schedule.delay=0", "schedule.lockstep=true"]
    counts = [
        disk(*changes, recipe=live)["policies at most"] / POLICY
        for changes in (exported, [], ["schedule.delay=0", "schedule.max_lag=63"], ["eval.every_updates=64"])
    ]
    assert [count - counts[0] for count in counts] == [0, 2, 3, 2 + 3 + 1]  # best/ too
