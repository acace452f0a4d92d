"""Dynamic sampling trains the first candidates with variance in id order, however replicas generate them."""

import random

import numpy as np
import pytest
import torch.distributed as dist

from megarl.distributed import ReplicaGroup
from megarl.errors import UserError
from megarl.phases.candidates import Candidates, Choice
from megarl.recipe.load import load_recipe
from megarl.storage.rollouts import Group, Response


def choice(varies, wanted, first=0):
    made = Choice(range(first, first + len(varies)), wanted)
    for number, one in enumerate(varies):
        made.add(first + number, one)
    return made


def test_the_first_groups_with_variance_are_chosen_and_filled_up_in_id_order():
    assert choice([False, True, True, False, True, True], 3, first=10).chosen() == [11, 12, 14]
    assert choice([False, False, True, False, True], 4).chosen() == [0, 1, 2, 4]


def test_a_stage_with_too_few_groups_with_variance_says_so():
    alone = Candidates(ReplicaGroup(dist.HashStore(), 0, 1), range(2), 1)
    for group in range(2):
        assert alone.may_be_chosen([group]) and not alone.are_enough()
        alone.add(scored_group(group, [1.0, 1.0]))
    assert alone.chosen() == [0]
    assert alone.summary() == {"candidates": 2, "generated": 2, "with_variance": 0, "chosen": 1, "filled": 1}


def test_no_unknown_candidate_can_change_a_final_choice():
    """Candidates become known in random orders; after each one, all outcomes of the unknown ones are tried."""
    rng = random.Random(0)
    finals = 0
    for _ in range(300):
        truth = [rng.random() < 0.5 for _ in range(7)]
        wanted, order = rng.randint(1, 6), rng.sample(range(7), 7)
        made = Choice(range(7), wanted)
        for known, group in enumerate(order, 1):
            made.add(group, truth[group])
            made.add(group, truth[group])
            unknown = sorted(order[known:])
            outcomes = []
            for bits in range(2 ** len(unknown)):
                whole = dict(made.varies) | {g: bool(bits >> i & 1) for i, g in enumerate(unknown)}
                outcomes.append(choice([whole[g] for g in range(7)], wanted).chosen())
            assert not any(set(outcome) & set(range(made.end, 7)) for outcome in outcomes)
            if made.is_final:
                finals += known < 7
                assert all(outcome == made.chosen() for outcome in outcomes)
            elif sum(made.varies.values()) >= wanted:
                assert len(set(map(tuple, outcomes))) > 1, "the choice is final, but `is_final` is False"
    assert finals > 50


def scored_group(group, rewards):
    responses = [Response(np.ones(1, np.int32), np.zeros(1, np.float32), reward, "stop", 0) for reward in rewards]
    return Group(group, np.array([5], np.int32), tuple(responses))


def test_replicas_share_which_groups_they_have_generated():
    store = dist.HashStore()
    one, two = (Candidates(ReplicaGroup(store, rank, 2), range(20, 28), 2) for rank in range(2))
    two.add(scored_group(22, [1.0, 0.0]))
    two.add(scored_group(23, [1.0, 0.0]))
    assert one.may_be_chosen([20, 21]), "groups with lower ids come first, even if higher ones have variance"
    assert not one.may_be_chosen([24, 25]) and not one.are_enough()
    one.add(scored_group(20, [0.0, 0.0]))
    one.add(scored_group(21, [0.5, 0.0]))
    assert two.may_be_chosen([22, 23]) and not two.may_be_chosen([23, 24])
    assert two.are_enough() and two.chosen() == [21, 22]
    assert two.summary() == {"candidates": 8, "generated": 4, "with_variance": 3, "chosen": 2, "filled": 0}


@pytest.mark.parametrize(("oversample", "candidates"), [(1, 10), (1.1, 11), (1.01, 11)])
def test_the_number_of_candidates_of_a_stage(recipe, oversample, candidates):
    schedule = ["schedule.updates_per_stage=5", "schedule.prompts_per_update=2"]
    found = load_recipe(recipe, [*schedule, f"rollout.oversample={oversample}"])
    assert (found.groups_per_stage, found.candidates_per_stage) == (10, candidates)


def test_unusable_oversampling_is_refused(recipe):
    cut = ["schedule.kind=live", "schedule.lockstep=true", "schedule.sync_every=4", "schedule.stages=1"]
    one = ["rollout.responses_per_prompt=1", "objective.advantage=batch_normalised"]
    for changes, message in ((one, "responses_per_prompt must be at least 2"), (cut, "sync_every must divide")):
        with pytest.raises(UserError, match=f"oversample = 2.0 .*{message}"):
            load_recipe(recipe, ["rollout.oversample=2.0", *changes])
