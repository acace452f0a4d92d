"""The synthetic responses on which `megarl.phases.rehearse` makes an update."""

import numpy as np
import pytest

from megarl.phases.rehearse import MICRO_BATCHES, _groups
from megarl.recipe.load import load_recipe, override_recipe

HF = {"vocab_size": 30}


@pytest.mark.parametrize(("longest", "ranks"), [(100, 1), (100, 2), (30, 1), (10, 1)])
def test_responses_fill_the_micro_batches_of_every_rank(recipe, longest, ranks):
    settings = ["schedule.prompts_per_update=32", "rollout.responses_per_prompt=8", "actor.tokens_per_micro_batch=2560"]
    table = override_recipe(load_recipe(recipe), [*settings, f"rollout.max_response_tokens={longest}"])
    groups = list(_groups(table, HF, np.random.default_rng(0), ranks))
    lengths = np.array([len(response.tokens) for group in groups for response in group.responses])
    wanted = min(longest * 256, MICRO_BATCHES * ranks * 2560)
    assert lengths.max() == longest
    assert lengths.min() >= 1
    assert lengths.sum() == pytest.approx(wanted, rel=0.07)
