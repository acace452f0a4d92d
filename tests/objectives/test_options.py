"""Options: each formula compared with a literal one, the objectives that it combines with, and the order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives import OBJECTIVES, Objective, build_objective
from tests.objectives.random_batches import random_batch

BATCHES = [
    random_batch(seed, kind) for kind in ("continuous", "ties", "heavy_tails", "empty_masks") for seed in range(12)
]
# loss and kept tokens; the tokens that a limit changes; sums that metrics have
Literal = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, float]]


def kl(batch: TokenBatch, plain: Objective, kind: str) -> Literal:
    base, l = plain(batch), batch.logprobs.double() - batch.ref_logprobs
    values = {"k1": l, "k2": l**2 / 2, "k3": torch.exp(-l) - 1 + l}
    k3 = float(values["k3"][batch.loss_mask].sum())
    return base.loss + 0.3 * values[kind], base.kept, batch.loss_mask, {"kl_ref/k3": k3}


def dual_clip(batch: TokenBatch, plain: Objective) -> Literal:
    base, most = plain(batch), -1.5 * batch.advantages
    capped = batch.loss_mask & (batch.advantages < 0) & (base.loss > most)
    kept = base.kept & ~capped
    return torch.where(capped, most, base.loss), kept, capped, {"dual_clip_fraction": float(capped.sum())}


def mismatch(batch: TokenBatch, plain: Objective, low: float) -> Literal:
    """Ratios are relative to old_logprobs; old / rollout is a weight without a gradient, 0 out of bounds if low > 0."""
    base = plain(replace(batch, rollout_logprobs=batch.old_logprobs))
    ratio = torch.exp(batch.old_logprobs.double() - batch.rollout_logprobs)
    weight = torch.where((ratio < low) | (ratio > 1.1), 0.0, ratio) if low else ratio.clamp(max=1.1)
    return weight * base.loss, base.kept & (weight > 0), batch.loss_mask & (weight != ratio), {}


def opsm(batch: TokenBatch, plain: Objective) -> Literal:
    """Masks responses with A < 0 that have drifted."""
    base, masked = plain(batch), torch.zeros_like(batch.loss_mask)
    drift = batch.rollout_logprobs.double() - batch.logprobs.detach()
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        mask = batch.loss_mask[a:b]
        if mask.any() and float(drift[a:b][mask].mean()) > 0.05:
            masked[a:b] = mask & (batch.advantages[a:b] < 0)
    return torch.where(masked, 0, base.loss), base.kept & ~masked, masked, {}


@pytest.mark.parametrize(
    ("fields", "literal"),
    [
        *(({"kl": {"coefficient": 0.3, "kind": kind}}, partial(kl, kind=kind)) for kind in ("k1", "k2", "k3")),
        ({"dual_clip": {"clip_ratio_c": 1.5}}, dual_clip),
        ({"truncated_importance": {"maximum": 1.1}}, partial(mismatch, low=0.0)),
        ({"icepop": {"minimum": 0.9, "maximum": 1.1}}, partial(mismatch, low=0.9)),
        ({"opsm": {"delta": 0.05}}, opsm),
    ],
)
def test_an_option_has_the_loss_gradient_and_kept_tokens_of_its_formula(fields: dict, literal: Any) -> None:
    objective, plain = build_objective("dapo", fields), build_objective("dapo", {})
    limited = kept_count = 0
    for batch in BATCHES:
        ours, mask = objective(batch), batch.loss_mask
        loss, kept, caught, totals = literal(batch, plain)
        assert torch.equal(ours.kept & mask, kept & mask) and (ours.loss[~mask] == 0).all()
        slopes = [torch.autograd.grad(x[mask].sum(), batch.logprobs)[0] for x in (ours.loss, loss)]
        for found, expected in ((ours.loss, loss), slopes):
            torch.testing.assert_close(found[mask].double(), expected[mask].double(), rtol=1.3e-6, atol=1e-6)
        for name, total in totals.items():
            assert float(ours.metrics[name][0]) == pytest.approx(total, rel=1e-4, abs=1e-4)
            assert int(ours.metrics[name][1]) == int(mask.sum())
        assert int(ours.metrics["kept_fraction"][0]) == int((ours.kept & mask).sum())
        total, _ = ours.metrics["loss"]  # it is the loss that is minimised
        assert float(total) == pytest.approx(float(ours.loss.detach().double().sum()), rel=1e-9)
        limited, kept_count = limited + int(caught.sum()), kept_count + int(ours.kept.sum())
    assert limited > 50 and kept_count > 50


def test_entropy_bonus_gives_the_entropy_a_gradient() -> None:
    batch = BATCHES[0]
    entropy = torch.rand(batch.logprobs.numel(), requires_grad=True)
    batch = replace(batch, entropy=entropy)
    ours = build_objective("grpo", {"entropy_bonus": {"coefficient": 0.2}})(batch)
    base = build_objective("grpo", {})(batch)
    expected = torch.where(batch.loss_mask, -0.2 * entropy, 0)
    torch.testing.assert_close(ours.loss - base.loss, expected, atol=1e-6, rtol=1e-5)
    (slope,) = torch.autograd.grad(ours.loss.sum(), entropy)
    torch.testing.assert_close(slope, -0.2 * batch.loss_mask.float())
    total, count = ours.metrics["entropy"]
    assert float(total / count) == pytest.approx(float(entropy.detach()[batch.loss_mask].mean()), rel=1e-6)


def test_options_apply_in_one_order_whatever_that_of_the_recipe() -> None:
    """Weights and masks change only the clipped policy term, not the KL penalty."""
    fields = {
        "kl": {"coefficient": 0.5, "kind": "k1"},
        "icepop": {"minimum": 0.99, "maximum": 1.01},
        "dual_clip": {"clip_ratio_c": 1.0},
    }
    compared = 0
    for batch in BATCHES[:20]:
        one = build_objective("grpo", fields)(batch)
        other = build_objective("grpo", dict(reversed(list(fields.items()))))(batch)
        torch.testing.assert_close(one.loss, other.loss, rtol=0, atol=0)
        muted = batch.loss_mask & ~one.kept & (batch.advantages < 0)
        far = (batch.old_logprobs - batch.rollout_logprobs).abs() > 0.02
        penalty = 0.5 * (batch.logprobs - batch.ref_logprobs)
        torch.testing.assert_close(one.loss[muted & far], penalty[muted & far])
        compared += int((muted & far).sum())
    assert compared > 100


def test_options_keep_what_the_objective_needs() -> None:
    composed = build_objective("m2po", {"kl": {}, "truncated_importance": {}, "m2_threshold": 0.1})
    assert composed.needs_statistics and composed.aggregation == "token_mean"
    assert set(composed.requires) == {"ref_logprobs", "old_logprobs"}
    batch = BATCHES[0]
    seen = replace(batch, rollout_logprobs=batch.old_logprobs)
    theirs = OBJECTIVES["m2po"](m2_threshold=0.1).statistics(seen)
    assert torch.equal(composed.statistics(batch)[0], theirs[0])


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("grpo", {"kl": {}}, "ref_logprobs"),
        ("grpo", {"entropy_bonus": {}}, "entropy"),
        ("grpo", {"icepop": {}}, "old_logprobs"),
        ("decoupled_ppo", {}, "old_logprobs"),
    ],
)
def test_error_names_the_missing_field_of_the_batch(name: str, options: dict, field: str) -> None:
    with pytest.raises(UserError, match=field):
        build_objective(name, options)(replace(BATCHES[0], **{field: None}))
