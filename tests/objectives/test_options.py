"""Options: each formula compared with a literal one, the objectives that it combines with, and the order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives import OBJECTIVES, build_objective
from tests.objectives.random_batches import random_batch


def trained(batch: TokenBatch, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double()[batch.loss_mask]


def gradient(loss: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), batch.logprobs)[0].double()[batch.loss_mask]


BATCHES = [
    random_batch(seed, kind) for kind in ("continuous", "ties", "heavy_tails", "empty_masks") for seed in range(12)
]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalty_adds_its_value_and_gradient(kind: str) -> None:
    objective = build_objective("dapo", {"kl": {"coefficient": 0.3, "kind": kind}})
    plain = build_objective("dapo", {})
    for batch in BATCHES:
        l = trained(batch, batch.logprobs) - trained(batch, batch.ref_logprobs)
        value = {"k1": l, "k2": l**2 / 2, "k3": torch.exp(-l) - 1 + l}[kind]
        slope = {"k1": torch.ones_like(l), "k2": l, "k3": 1 - torch.exp(-l)}[kind]
        ours, base = objective(batch), plain(batch)
        torch.testing.assert_close(
            trained(batch, ours.loss), trained(batch, base.loss) + 0.3 * value, rtol=1e-5, atol=1e-6
        )
        expected = gradient(base.loss, batch) + 0.3 * slope
        torch.testing.assert_close(gradient(ours.loss, batch), expected, rtol=1e-5, atol=1e-6)
        assert (ours.loss[~batch.loss_mask] == 0).all()
        assert torch.equal(ours.kept, base.kept)
        total, count = ours.metrics["kl_ref/k3"]
        assert float(total) == pytest.approx(float((torch.exp(-l) - 1 + l).sum()), rel=1e-4, abs=1e-4)
        assert int(count) == l.numel()
        total, _ = ours.metrics["loss"]  # it is the loss that is minimised
        assert float(total) == pytest.approx(float(ours.loss.detach().double().sum()), rel=1e-9)


def test_dual_clip_bounds_the_loss_of_tokens_with_negative_advantage() -> None:
    objective, plain = build_objective("grpo", {"dual_clip": {"clip_ratio_c": 2.0}}), build_objective("grpo", {})
    caught = 0
    for batch in BATCHES:
        ours, base = objective(batch), plain(batch)
        a = batch.advantages
        literal = torch.where(a < 0, torch.maximum(-base.loss, 2.0 * a), -base.loss)
        literal = torch.where(batch.loss_mask, -literal, 0)
        torch.testing.assert_close(ours.loss, literal)
        capped = batch.loss_mask & (a < 0) & (-base.loss < 2.0 * a)
        assert torch.equal(ours.kept, base.kept & ~capped)
        expected = torch.where(capped[batch.loss_mask], 0, gradient(base.loss, batch))
        torch.testing.assert_close(gradient(ours.loss, batch), expected)
        assert float(ours.metrics["dual_clip_fraction"][0]) == int(capped.sum())
        caught += int(capped.sum())
    assert caught > 10


@pytest.mark.parametrize("option", ["truncated_importance", "icepop"])
def test_mismatch_of_trainer_and_engine_weights_the_loss(option: str) -> None:
    """Ratios are relative to old_logprobs; the mismatch old / rollout is a weight without a gradient."""
    fields = {"maximum": 1.1} if option == "truncated_importance" else {"minimum": 0.9, "maximum": 1.1}
    objective, plain = build_objective("grpo", {option: fields}), build_objective("grpo", {})
    limited = 0
    for batch in BATCHES:
        base = plain(replace(batch, rollout_logprobs=batch.old_logprobs))
        ratio = torch.exp(trained(batch, batch.old_logprobs) - trained(batch, batch.rollout_logprobs))
        if option == "truncated_importance":
            weight = ratio.clamp(max=1.1)
        else:
            weight = torch.where((ratio < 0.9) | (ratio > 1.1), 0.0, ratio)
        ours = objective(batch)
        torch.testing.assert_close(trained(batch, ours.loss), weight * trained(batch, base.loss), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            gradient(ours.loss, batch), weight * gradient(base.loss, batch), rtol=1e-5, atol=1e-6
        )
        assert torch.equal(ours.kept[batch.loss_mask], base.kept[batch.loss_mask] & (weight > 0))
        limited += int((weight != ratio).sum())
    assert limited > 50


def test_opsm_masks_drifted_responses_with_negative_advantage() -> None:
    objective, plain = build_objective("grpo", {"opsm": {"delta": 0.05}}), build_objective("grpo", {})
    masked_count = kept_count = 0
    for batch in BATCHES:
        masked = torch.zeros_like(batch.loss_mask)
        for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            drift = [
                float(batch.rollout_logprobs[i] - batch.logprobs[i].detach()) for i in range(a, b) if batch.loss_mask[i]
            ]
            if drift and sum(drift) / len(drift) > 0.05:
                masked[a:b] = batch.loss_mask[a:b] & (batch.advantages[a:b] < 0)
        ours, base = objective(batch), plain(batch)
        torch.testing.assert_close(ours.loss, torch.where(masked, 0, base.loss))
        assert torch.equal(ours.kept, base.kept & ~masked)
        masked_count, kept_count = masked_count + int(masked.sum()), kept_count + int(ours.kept.sum())
    assert masked_count > 50 and kept_count > 50


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
    assert torch.equal(composed.statistics(batch).threshold, theirs.threshold)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("grpo", {"kl": 0.1}, ["objective.kl", "0.1", "table"]),
        ("grpo", {"kl": {"coef": 0.1}}, ["objective.kl", "coef", "coefficient"]),
        ("grpo", {"kl": {"kind": "k4"}}, ["kind", "k4", "k3, k1, k2"]),
        ("grpo", {"kl": {"coefficient": -1}}, ["coefficient", "-1", "[0, inf]"]),
        ("grpo", {"icepopp": {}}, ["icepopp", "icepop"]),
        ("cispo", {"dual_clip": {}}, ["dual_clip", "Cispo"]),
        ("grpo", {"icepop": {}, "truncated_importance": {}}, ["icepop", "truncated_importance"]),
        ("grpo", {"dual_clip": {"clip_ratio_c": 0.5}}, ["clip_ratio_c", "0.5", "[1, inf]"]),
    ],
)
def test_error_names_the_wrong_option(name: str, fields: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        build_objective(name, fields)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("kl", "ref_logprobs"),
        ("entropy_bonus", "entropy"),
        ("icepop", "old_logprobs"),
        ("truncated_importance", "old_logprobs"),
    ],
)
def test_error_names_the_missing_field_of_the_batch(option: str, field: str) -> None:
    batch = replace(BATCHES[0], **{field: None})
    with pytest.raises(UserError, match=field):
        build_objective("grpo", {option: {}})(batch)
    assert math.isfinite(float(build_objective("grpo", {})(batch).loss.detach().sum()))
