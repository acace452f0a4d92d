"""Learning rates of a run of 100 updates, calculated by hand."""

import math

import pytest

from megarl.recipe.actor_table import OptimizerTable


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {1: 2.0, 50: 2.0, 100: 2.0}),
        ({"warmup_updates": 10}, {1: 0.2, 5: 1.0, 10: 2.0, 11: 2.0, 100: 2.0}),
        # 5 of verl's steps with 4 updates each: 0 in the first, then 1/5 ..
        ({"warmup_updates": 20, "warmup_step": 4}, {1: 0.0, 4: 0.0, 5: 0.4, 8: 0.4, 9: 0.8, 20: 1.6, 21: 2.0}),
        ({"schedule": "linear", "warmup_updates": 20, "min_lr": 1.0}, {10: 1.0, 20: 2.0, 60: 1.5, 100: 1.0}),
        ({"schedule": "cosine", "warmup_updates": 40}, {20: 1.0, 40: 2.0, 60: 1 + math.cos(math.pi / 3), 100: 0.0}),
        ({"schedule": "wsd", "decay_updates": 20}, {1: 2.0, 80: 2.0, 85: 1.5, 95: 0.5, 100: 0.0}),
        # the decay begins where the warm-up ends, if that is later
        ({"schedule": "wsd", "decay_updates": 80, "warmup_updates": 60}, {30: 1.0, 60: 2.0, 80: 1.0, 100: 0.0}),
    ],
)
def test_learning_rates_with_warm_up_and_decay(settings, expected):
    table = OptimizerTable(**{"lr": 1.0} | settings)
    # a recipe may not have lr > 1, but the expected rates, and min_lr, are those of lr = 2
    table = OptimizerTable.model_construct(**dict(table) | {"lr": 2.0})
    assert {update: table.learning_rate(update, 100) for update in expected} == pytest.approx(expected, abs=1e-12)
