"""The rehearsal: synthetic responses that fill every rank, three updates, and exports that are compared."""

import numpy as np
import pytest

from megarl.phases.rehearse import MICRO_BATCHES, _groups
from megarl.recipe.load import load_recipe, override_recipe
from tests.helpers import megarl

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


def test_three_updates_are_made_and_an_export_with_old_weights_is_noticed(recipe):
    assert megarl("doctor", "--recipe", recipe).returncode == 0
    found = megarl("doctor", "--recipe", recipe, mutant="an_export_has_the_head_of_before_the_third_update")
    told = found.stdout + found.stderr
    assert found.returncode != 0 and "the exported policy has not the optimizer's weights of" in told
    assert "output_layer.weight (" in told
