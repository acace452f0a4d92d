"""Advantages compared with values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.advantages import group_advantages, zero_variance
from megarl.errors import UserError

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])


# of one of two right responses, and of one of four; the standard deviations have G - 1
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("group_mean_std", 0.5 / (math.sqrt(1 / 3) + 1e-6), 0.75 / (0.5 + 1e-6)),
        ("group_mean", 0.5, 0.75),
        ("leave_one_out", 2 / 3, 1.0),
    ],
)
def test_advantages_within_a_group_by_hand(kind: str, first: float, second: float) -> None:
    expected = [[first, -first, -first, first], [second, *[-second / 3] * 3], [0.0] * 4]
    torch.testing.assert_close(group_advantages(REWARDS, kind), torch.tensor(expected))
    assert torch.equal(group_advantages(np.asarray(REWARDS), kind), group_advantages(REWARDS, kind))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("batch_normalised", (REWARDS - REWARDS.mean()) / REWARDS.std()),  # not 0 in a group without variance
        ("optimal", REWARDS - 0.5 * (2 * REWARDS).exp().mean(1, keepdim=True).log()),
    ],
)
def test_advantages_by_their_formulas(kind: str, expected: torch.Tensor) -> None:
    torch.testing.assert_close(group_advantages(REWARDS, kind), expected, atol=1e-5, rtol=0)


def test_groups_without_variance_get_exactly_zero() -> None:
    """The mean of three times .7 differs from .7 by a rounding error, which the division by 1e-6 would magnify."""
    rewards = torch.full((1, 3), 0.7, dtype=torch.float64)
    assert (rewards - rewards.mean()).abs().max() > 0
    for kind in ("group_mean_std", "group_mean", "leave_one_out"):
        assert (group_advantages(rewards, kind) == 0).all()
    assert zero_variance(REWARDS).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("rewards", "kind", "words"),
    [
        (REWARDS, "mean", ["'mean'", "group_mean_std"]),
        (REWARDS[:, :1], "group_mean_std", ["group_mean_std", "responses_per_prompt", "2"]),
        (REWARDS[0], "group_mean", ["(4,)"]),
        (torch.tensor([[0.0, math.nan]]), "group_mean", ["rewards[0, 1]", "nan"]),
    ],
)
def test_error_names_the_wrong_kind_shape_or_reward(rewards: torch.Tensor, kind: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        group_advantages(rewards, kind)
    assert all(word in str(error.value) for word in words), str(error.value)
