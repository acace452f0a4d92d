"""The estimated size of a run directory, compared with counts by hand.

`tests/phases/test_retention.py` compares it with real run directories.
"""

import pytest

from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import Assumptions
from megarl.planner.disk import disk_bytes
from megarl.recipe.load import load_recipe, override_recipe
from tests.planner.moe import MOE, staged

HF = read_hf_config(MOE.parent)
RECIPE = staged()
PARAMETERS = 30_532_122_624
CHECKPOINT, POLICY = PARAMETERS * (2 + 4 + 4 + 4), PARAMETERS * 2
FULL = Assumptions(mean_prompt=1.0, mean_response=1.0)
RESPONSE = (2048 + 20480) * 4 + 20480 * 4
ANSWERS = (30 + 30 + 40) * 128 + (500 + 674 + 272 + 1319) * 2  # responses to all suites, in one evaluation


def disk(*settings, recipe=RECIPE):
    return disk_bytes(HF, override_recipe(recipe, list(settings)), PARAMETERS, FULL)


def held(parts, moment):
    """Bytes of checkpoints and policies at a moment: without responses, which are the same at all moments."""
    both = parts["rollout store of all stages"] + parts.get("responses to evaluations", 0)
    return parts[f"the run directory, at its {moment}"] - both


def test_sizes_of_stored_responses():
    parts = disk()
    assert parts["rollout store of a stage"] == 48 * 32 * 8 * RESPONSE
    assert parts["rollout store of all stages"] == 40 * parts["rollout store of a stage"]
    assert parts["responses to evaluations"] == 41 * ANSWERS * RESPONSE
    assert "responses to evaluations" not in disk("eval.every=0")
    experts = 48 * 32 * 8 * (2048 + 20480) * 48 * 8  # a byte for each of 128 experts
    replayed = override_recipe(RECIPE, ["actor.routing_replay=engine"])
    for hf, width in ((HF, 1), (HF | {"num_experts": 129}, 2)):
        with_experts = disk_bytes(hf, replayed, PARAMETERS, FULL)
        assert with_experts["rollout store of a stage"] == parts["rollout store of a stage"] + experts * width


@pytest.mark.parametrize(
    ("settings", "largest", "end"),
    [
        # 40 stages of one checkpoint each: that of the stage before is kept, and all policies, the last one as final/
        ([], [(2, 41)], (1, 41)),
        (["actor.keep_stages=99"], [(40, 41)], (40, 41)),
        # three checkpoints a stage: two of the stage before and two of this one are kept, the third is being written
        (["actor.checkpoint_every=16", "actor.keep_checkpoints=2"], [(5, 40), (4, 41)], (2, 41)),
        # the first policy, one of a finished stage, the current one, the next, and best/
        (["actor.keep_policies=1"], [(2, 5)], (1, 4)),
        (["actor.keep_policies=3", "eval.every=0"], [(2, 6)], (1, 5)),
        (["actor.keep_policies=39"], [(2, 41)], (1, 41)),
        (["actor.keep_policies=1", "schedule.stages=1"], [(1, 2)], (1, 2)),
        # three more policies, which wait for their evaluation, and best/
        (["eval.every_updates=12"], [(2, 45)], (1, 42)),
    ],
)
def test_numbers_of_checkpoints_and_policies_follow_retention(settings, largest, end):
    parts = disk(*settings)
    assert parts["one checkpoint"] == CHECKPOINT and parts["one export"] == POLICY
    assert held(parts, "largest") == max(c * CHECKPOINT + p * POLICY for c, p in largest)
    assert held(parts, "end") == end[0] * CHECKPOINT + end[1] * POLICY
    assert parts["checkpoints at most"] == max(c for c, _ in largest) * CHECKPOINT
    assert parts["policies at most"] == max(p for _, p in largest) * POLICY


def test_policies_within_a_stage_of_a_live_run_are_counted():
    """MinPRO's recipe exports a version every 16 updates, of which three exist at a time.

    With eval.every_updates = 64, those after 64 and 128 of a stage's 160 updates wait for their evaluation too.
    """
    live, name = load_recipe(MOE), "policies between stages, at most"
    assert disk(recipe=live)[name] == 3 * POLICY
    assert disk("schedule.delay=0", "schedule.max_lag=63", recipe=live)[name] == 4 * POLICY
    assert disk("eval.every_updates=64", recipe=live)[name] == 5 * POLICY
    assert name not in disk()
    without = disk("schedule.delay=0", "schedule.lockstep=true", recipe=live)
    assert held(disk(recipe=live), "largest") - held(without, "largest") == 2 * POLICY


def test_adapters_have_small_checkpoints():
    parts = disk_bytes(HF, RECIPE, PARAMETERS, FULL, trained=1000)
    assert (parts["one checkpoint"], parts["one export"]) == (14_000, POLICY)


@pytest.mark.parametrize(
    ("stages", "updates", "every", "every_updates"),
    [(4, 6, 1, 4), (4, 6, 2, 0), (3, 5, 0, 3), (3, 5, 5, 100), (1, 4, 0, 1), (3, 4, 0, 0)],
)
def test_evaluated_policies_are_counted_for_every_schedule(stages, updates, every, every_updates):
    settings = [f"schedule.stages={stages}", f"schedule.updates_per_stage={updates}"]
    settings += [f"eval.every={every}", f"eval.every_updates={every_updates}"]
    recipe, parts = override_recipe(RECIPE, settings), disk(*settings)
    versions = [v for v in range(stages * updates + 1) if recipe.is_evaluated(v)]
    assert parts.get("responses to evaluations", 0) == len(versions) * ANSWERS * RESPONSE
    waiting = parts.get("policies between stages, at most", 0) / POLICY
    # after so many stages, the first update of a stage is as far from a multiple of every_updates as before
    stages_alike = range(max(1, every_updates))
    assert waiting == max(
        sum(every_updates > 0 and v % every_updates == 0 for v in range(s * updates + 1, (s + 1) * updates))
        for s in stages_alike
    )
