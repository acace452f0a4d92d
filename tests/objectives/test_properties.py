"""Properties that hold for every batch; hypothesis searches for a counterexample."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES, build_objective
from megarl.objectives.parts.prefix_min import prefix_min_log_ratio
from tests.objectives.random_batches import random_batch

SEVENTHS = st.integers(-40, 40).map(lambda k: k / 7)
LOG_RATIOS = st.one_of(SEVENTHS, st.floats(-2, 2, width=32))
quick = settings(max_examples=150)


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    """A batch of responses with random log-ratios, trained and untrained tokens, and one advantage per response."""
    responses = draw(
        st.lists(st.tuples(st.lists(st.tuples(LOG_RATIOS, st.booleans()), max_size=8), st.integers(-2, 2)), max_size=5)
    )
    tokens = [(l, t, a) for response, a in responses for l, t in response]
    l, trained, advantages = (torch.tensor([token[i] for token in tokens]) for i in range(3))
    lengths = torch.tensor([0, *(len(response) for response, _ in responses)])
    return TokenBatch(
        logprobs=l.float().requires_grad_(),
        rollout_logprobs=torch.zeros(len(tokens)),
        advantages=advantages.float(),
        loss_mask=trained.bool(),
        cu_seqlens=lengths.cumsum(0).int(),
        old_logprobs=torch.zeros(len(tokens)),
    )


@quick
@given(batches(), st.sampled_from([0.001, 0.04, 0.3, 1.0]))
def test_m2po_keeps_as_much_as_the_budget_allows(batch: TokenBatch, threshold: float) -> None:
    """Kept trust-region tokens have a mean l^2 within the threshold; one more token would exceed it."""
    kept = build_objective("m2po", {"m2_threshold": threshold})(batch).kept
    l = batch.logprobs.detach().double()
    trust = batch.loss_mask & (batch.advantages * l > 0)
    assert torch.equal(kept & ~trust, batch.loss_mask & ~trust), "tokens outside the trust region are never masked"
    squares, dropped = l[kept & trust].square(), l[trust & ~kept].square()
    if len(squares):
        assert float(squares.mean()) <= threshold + 1e-8
    if len(dropped):
        with_one_more = torch.cat([squares, dropped.min()[None]])
        assert float(with_one_more.mean()) > threshold - 1e-8
        assert not len(squares) or squares.max() <= dropped.min()


@quick
@given(batches())
def test_chi_square_is_bounded_by_the_second_moment(batch: TokenBatch) -> None:
    """Theorem 5.1 of M2PO: chi^2 <= R^2 M2 where 1/R <= rho <= R."""
    assume(bool(batch.loss_mask.any()))
    metrics = build_objective("reinforce", {})(batch).metrics
    chi2, m2 = (float(metrics[name][0] / metrics[name][1]) for name in ("chi2", "m2/all"))
    largest = math.exp(float(batch.logprobs.detach()[batch.loss_mask].abs().max()))
    assert chi2 <= largest**2 * m2 * (1 + 1e-9) + 1e-12


@quick
@given(batches(), st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
def test_veto_scopes_are_nested(batch: TokenBatch, threshold: float) -> None:
    def vetoed(scope: str) -> torch.Tensor:
        fields = {"veto_scope": scope, "veto_threshold": threshold, "ratio_max": math.inf}
        return batch.loss_mask & ~build_objective("mu_grpo", fields)(batch).kept

    sequence, suffix, trigger, non_triggers = (
        vetoed(s) for s in ("sequence", "suffix", "trigger", "non_trigger_suffix")
    )
    assert not (trigger & non_triggers).any(), "triggers are not in the suffix without triggers"
    assert not (non_triggers & ~suffix).any(), "the suffix without triggers is in the suffix"
    assert torch.equal(trigger | suffix, trigger | non_triggers), "the suffix has no other tokens"
    assert not ((suffix | trigger) & ~sequence).any(), "all scopes are in the sequence"
    assert not (sequence & (batch.advantages >= 0)).any(), "only tokens with A < 0 are vetoed"
    assert bool(sequence.any()) == bool(trigger.any())


@quick
@given(batches(), st.data())
def test_a_lower_ratio_never_raises_a_later_prefix_minimum(batch: TokenBatch, data: st.DataObject) -> None:
    """m_t never increases when an earlier ratio decreases; later tokens and other responses do not change it."""
    tokens = batch.logprobs.numel()
    assume(tokens > 0)
    index = data.draw(st.integers(0, tokens - 1))
    lower = batch.logprobs.detach().clone()
    lower[index] -= data.draw(st.sampled_from([2**-6, 0.5, 3.0]))
    before = prefix_min_log_ratio(batch.logprobs.detach(), batch)
    after = prefix_min_log_ratio(lower, batch)
    # the first trained token of a response has no prefix: m = 1 by convention, whatever came before it
    first_trained = [
        next((i for i in range(a, b) if batch.loss_mask[i]), b)
        for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    ]
    response_of = torch.searchsorted(batch.cu_seqlens[1:].long(), torch.arange(tokens), right=True)
    assert (after <= before).all()
    same_response = response_of == response_of[index]
    later = torch.arange(tokens) > index
    untouched = ~(same_response & later) | ~batch.loss_mask[index]
    assert torch.equal(after[untouched], before[untouched])
    assert all(float(before[i]) == 0 for i in first_trained if i < tokens)


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in OBJECTIVES] + [(name, {"variant": "released"}) for name in ("m2po", "bapo")],
)
@settings(max_examples=40)
@given(batch=batches())
def test_on_policy_every_objective_has_the_reinforce_gradient(
    name: str, fields: dict[str, str], batch: TokenBatch
) -> None:
    """With rho = 1 the gradient is -A grad log pi for every trained token, and all of them are kept."""
    same = batch.logprobs.detach().clone()
    batch = replace(batch, rollout_logprobs=same, old_logprobs=same)
    terms = build_objective(name, fields)(batch)
    assert torch.equal(terms.kept, batch.loss_mask)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), batch.logprobs)
    torch.testing.assert_close(gradient, torch.where(batch.loss_mask, -batch.advantages, 0))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_untrained_tokens_neither_count_nor_influence(name: str) -> None:
    """Removing them from the batch changes no loss, mask or metric of the other tokens."""
    for seed in range(60):
        batch = random_batch(seed)
        mask = batch.loss_mask
        lengths = [int(mask[a:b].sum()) for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
        dense = TokenBatch(
            *(x.detach()[mask] for x in (batch.logprobs, batch.rollout_logprobs, batch.advantages, mask)),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
            old_logprobs=batch.old_logprobs[mask],
        )
        ours, theirs = build_objective(name, {})(batch), build_objective(name, {})(dense)
        torch.testing.assert_close(ours.loss.detach()[mask], theirs.loss)
        assert torch.equal(ours.kept[mask], theirs.kept)
        for key, (total, count) in ours.metrics.items():
            other: Any = theirs.metrics[key]
            assert (float(total), float(count)) == pytest.approx(
                (float(other[0]), float(other[1])), rel=1e-6, abs=1e-9
            ), key


# in these a token's loss depends on the others of its response or batch
COUPLED = ("bapo", "cppo", "ctpo", "full_prefix", "gspo", "m2po", "minpro", "mu_grpo", "oapl", "prefix_filter",
           "prefix_ratio_grpo", "topr", "trm", "vespo")  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("names", [("logprobs",), ("rollout_logprobs",), ("logprobs", "rollout_logprobs")])
def test_log_probs_of_minus_infinity_give_a_finite_loss_and_no_gradient(
    names: tuple[str, ...], name: str, backend: str
) -> None:
    objective = build_objective(name, {})
    for seed in range(48):
        batch = random_batch(seed)
        gone = torch.rand(batch.logprobs.numel(), generator=torch.Generator().manual_seed(seed)) < 0.3
        fields = {field: torch.where(gone, -math.inf, getattr(batch, field).detach()) for field in names}
        fields.setdefault("logprobs", batch.logprobs.detach())
        without = replace(batch, **fields | {"logprobs": fields["logprobs"].requires_grad_()})
        terms = objective(without, backend=backend)
        (gradient,) = torch.autograd.grad(terms.loss.sum(), without.logprobs)
        assert terms.loss.isfinite().all() and gradient.isfinite().all(), seed
        assert (gradient[without.logprobs == -math.inf] == 0).all()
        assert all(math.isfinite(float(total)) for total, _ in terms.metrics.values())
        if name not in COUPLED:
            usual = objective(batch, backend=backend).loss
            torch.testing.assert_close(terms.loss[~gone], usual[~gone], rtol=1e-6, atol=1e-7)


@settings(max_examples=30)
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(batch: TokenBatch, random: Any) -> None:
    bounds = batch.cu_seqlens.tolist()
    sequences = list(range(len(bounds) - 1))
    random.shuffle(sequences)
    where = torch.cat([torch.zeros(0).long(), *(torch.arange(bounds[s], bounds[s + 1]) for s in sequences)])
    lengths = [bounds[s + 1] - bounds[s] for s in sequences]
    shuffled = TokenBatch(
        batch.logprobs.detach()[where], batch.rollout_logprobs[where], batch.advantages[where], batch.loss_mask[where],
        torch.tensor([0, *lengths]).cumsum(0).int(), old_logprobs=batch.old_logprobs[where],
        sequence_index=torch.tensor(sequences, dtype=torch.int64),
    )  # fmt: skip
    batch = replace(batch, sequence_index=torch.arange(len(sequences)))
    for name in OBJECTIVES:
        ours, theirs = build_objective(name, {})(batch), build_objective(name, {})(shuffled)
        assert torch.equal(ours.kept[where], theirs.kept), name
        torch.testing.assert_close(ours.loss.detach()[where], theirs.loss)
