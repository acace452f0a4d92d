"""Every objective on four tokens compared with values worked out by hand, and which tensors receive a gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES, build_objective
from megarl.objectives.parts.metrics import response_metrics
from megarl.objectives.parts.summary import summarise
from tests.objectives.random_batches import VARIANTS

A, B = math.log(0.6), math.log(0.1)  # log-probs of the four tokens: A, B, A, B


def four_tokens() -> TokenBatch:
    """Two responses of two tokens, advantages 2 and -1, ratios 1.5, .5, 1.5, .5."""
    return TokenBatch(
        logprobs=torch.tensor([0.6, 0.1, 0.6, 0.1]).log().requires_grad_(),
        rollout_logprobs=torch.tensor([0.4, 0.2, 0.4, 0.2]).log(),
        advantages=torch.tensor([2.0, 2.0, -1.0, -1.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
        old_logprobs=torch.tensor([0.4, 0.1, 0.6, 0.2]).log(),
    )


S = math.sqrt(0.75)  # geometric mean of 1.5 and .5
U, V = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-0.525))  # SAPO's sigmoids of .5 tau
U2, V2 = U * (1 - U), V * (1 - V)
F, G = 0.75**2 * math.exp(3 * 0.25), 0.75**3 * math.exp(2 * 0.25)  # VESPO's weights
W, X = 2 - 0.5 * math.log(0.75), 1 + 0.5 * math.log(0.75)  # OAPL's weights
# name, fields, loss, gradient of the summed loss; a token is kept exactly where its gradient is not 0
CASES: list[tuple[str, dict[str, Any], list[float], list[float]]] = [
    ("reinforce", {}, [-3, -1, 1.5, 0.5], [-3, -1, 1.5, 0.5]),
    ("grpo", {}, [-2.4, -1, 1.5, 0.8], [0, -1, 1.5, 0]),
    ("dapo", {}, [-2.56, -1, 1.5, 0.8], [0, -1, 1.5, 0]),
    ("gppo", {}, [-2.56, -1, 1.5, 0.8], [-2.56, -1, 1.5, 0.8]),
    # q = .4, .2: bounds [.5, 1.3660] and [.5, 1.6180], so that only the first token is clipped
    ("dcpo", {}, [-2 * (0.5 + 0.75**0.5), -1, 1.5, 0.5], [0, -1, 1.5, 0.5]),
    ("dcpo", {"eps_high": 2.0, "ratio_max": 1.4}, [-2.8, -1, 1.4, 0.5], [0, -1, 0, 0.5]),
    ("sapo", {}, [-8 * U, -8 * (1 - U), 4 * V / 1.05, 4 * (1 - V) / 1.05], [-12 * U2, -4 * U2, 6 * V2, 2 * V2]),
    # |p - q| = .2, .1, .2, .1; the first and the last token have moved in the direction of their advantage
    ("dppo", {}, [0, -1 * B, 1.5 * A, 0.5 * B], [0, -1, 1.5, 0.5]),
    ("dppo", {"threshold": 0.25, "ratio_max": 1.2}, [-2.4 * A, -1 * B, 1.2 * A, 0.5 * B], [-2.4, -1, 1.2, 0.5]),
    # w = .75 in both responses
    ("vespo", {}, [-2 * F * A, -2 * F * B, G * A, G * B], [-2 * F, -2 * F, G, G]),
    # k2 = .0822 and .2402 in both responses
    ("trm", {"threshold": 0.23}, [0, 0, 0, 0], [0, 0, 0, 0]),
    ("gspo", {}, [-2 * S, -2 * S, 0.998, 0.998], [-2 * S, -2 * S, 0, 0]),
    ("cispo", {"eps_low": 0.2, "eps_high": 0.2}, [-2.4 * A, -1.6 * B, 1.2 * A, 0.8 * B], [-2.4, -1.6, 1.2, 0.8]),
    ("minpro", {}, [-3 * A, -1.5 * B, 1.5 * A, 0.75 * B], [-3, -1.5, 1.5, 0.75]),
    ("prefix_ratio_grpo", {}, [-2.4, -1.5, 1.5, 0.8], [0, -1.5, 1.5, 0]),
    ("full_prefix", {"eps_low": 0.2, "eps_high": 0.4}, [-2.8 * A, -1.6 * B, 1.4 * A, 0.8 * B], [-2.8, -1.6, 1.4, 0.8]),
    # prefix ratios 1.5, .75, 1.5, .75: the two lowest are removed
    ("prefix_filter", {"filter_fraction": 0.5}, [-3 * A, 0, 1.5 * A, 0], [-3, 0, 1.5, 0]),
    # trust region: l = log 1.5 and log .5, squares .164 and .480; a budget of .2 keeps the first alone
    ("m2po", {"m2_threshold": 0.2}, [-3, -1, 1.5, 0], [-3, -1, 1.5, 0]),
    ("mu_grpo", {"veto_threshold": 0.6}, [-3, -1, 0, 0], [-3, -1, 0, 0]),
    # positive contribution at (.6, 1.2): 1.16 / 1.88 = .617; with c_high 1.45 it is 1.36 / 2.08 = .654
    ("bapo", {"positive_target": 0.65}, [-2.9, -1, 1.5, 0.6], [0, -1, 1.5, 0]),
    ("topr", {"ratio_max": 0.5}, [-2 * A, -2 * B, 0.5 * A, 0.5 * B], [-2, -2, 0.5, 0.5]),
    # |p - q| = .2, .1, .2, .1; weights 1, .8: the first token is masked at a threshold below .2
    ("cppo", {"threshold": 0.19}, [0, -1, 1.5, 0], [0, -1, 1.5, 0]),
    # prefix ratios 1.5, .75; bounds e^(-.025 sqrt t), e^(.05 sqrt t)
    ("ctpo", {"eps_low": 0.2, "eps_high": 0.5}, [-3, -1.5, 1.5, math.exp(-0.2 * 2**0.5)], [-3, -1.5, 1.5, 0]),
    # |A| q (rho - 1)^2 / 2 = .1, .05, .05, .025 and rho |A| (p - q) = .6, -.1, .3, -.05, at a threshold of .05
    ("drpo", {"threshold": 0.05}, [-1, 0, 2.5, 1], [9, -3, 7.5, -0.5]),
    # log rho_seq = log .75: A - beta log .75
    ("oapl", {"beta": 0.5}, [-W * A, -W * B, X * A, X * B], [-W, -W, X, X]),
    # weights 1, .5, 1.5, 1 and proximal ratios 1.5, 1, 1, .5
    ("decoupled_ppo", {"behaviour_weight_max": 1.25}, [-2.4, -1, 1.25, 0.8], [0, -1, 1.25, 0]),
]


@pytest.mark.parametrize(("name", "fields", "loss", "gradient"), CASES)
def test_loss_gradient_and_kept_tokens_by_hand(
    name: str, fields: dict[str, Any], loss: list[float], gradient: list[float]
) -> None:
    batch = four_tokens()
    terms = build_objective(name, fields)(batch)
    assert terms.loss.tolist() == pytest.approx(loss, abs=2e-6)
    (ours,) = torch.autograd.grad(terms.loss.sum(), batch.logprobs)
    assert ours.tolist() == pytest.approx(gradient, abs=2e-6)
    assert terms.kept.tolist() == [g != 0 for g in gradient]


def test_effective_sample_size_of_responses() -> None:
    """The weights of the responses are .75 and 2.25, so it is 1.5^2 / 2.8125; untrained responses do not count."""
    rho, mask = torch.tensor([1.5, 0.5, 1.5, 1.5, 9.0]), torch.tensor([True, True, True, True, False])
    batch = TokenBatch(rho.log(), torch.zeros(5), torch.ones(5), mask, torch.tensor([0, 2, 4, 5]))
    assert summarise(response_metrics(batch))["ess/responses"] == pytest.approx(0.8)


def test_every_objective_is_tested_by_hand() -> None:
    assert {case[0] for case in CASES} == set(OBJECTIVES)


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_only_the_policy_receives_a_gradient(name: str, fields: dict[str, str]) -> None:
    batch = four_tokens()
    others = ("rollout_logprobs", "advantages", "old_logprobs")
    batch = replace(batch, **{other: getattr(batch, other).clone().requires_grad_() for other in others})
    terms = build_objective(name, fields)(batch)
    terms.loss.sum().backward()
    assert batch.logprobs.grad is not None and float(batch.logprobs.grad.abs().sum()) > 0
    assert not any(getattr(batch, other).grad is not None for other in others)
    assert not any(value.requires_grad for pair in terms.metrics.values() for value in pair)
