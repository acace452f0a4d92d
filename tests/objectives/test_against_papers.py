"""Every objective has its paper's loss, mask and gradient, read literally in float64, on random batches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES, token_weights
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clip_bounds import BEYOND, contributions
from tests.extent import EVERY
from tests.kernels.test_token_pass import compare
from tests.objectives import papers
from tests.objectives.random_batches import KINDS, VARIANTS, random_batch

BACKENDS = ("torch", "cpp")
SEEDS = range(504 if EVERY else 96)  # a multiple of 24: all kinds, a third of each with NaN at untrained tokens
# every objective with its defaults, and others: name, fields, the formula, its settings. One without a function here
# fails, and so does prefix_filter with its defaults, which filter nothing out of so few tokens.
DEFAULTS = {n: (objective(), getattr(papers, n)) for n, objective in OBJECTIVES.items() if n != "prefix_filter"}
RELEASED = {"variant": "released"}
SOFT = ("cispo", "minpro", "full_prefix")
BAPO = [
    {"low_start": 0.8, "low_end": 0.95, "high_end": 2.0, "positive_target": 0.5},
    {"low_start": 0.8, "low_end": 0.95, "low_step": 0.05, "positive_target": 0.9},  # .15 / .05 rounds to 2.99...
    {"positive_target": 0.0},
    {"low_start": 0.9, "low_end": 0.9},
    {"high_start": 1.5, "high_end": 1.5, "positive_target": 0.7},
    {"low_start": 0.6, "low_end": 0.65, "high_start": 1.2, "high_end": 1.29, "positive_target": 0.9},
]
SETTINGS = [
    ("dppo", {"divergence": "kl"}, papers.dppo, ("kl", 0.05)),
    ("trm", {"estimator": "k3", "threshold": 0.5}, papers.trm, ("k3", 0.5)),
    ("m2po", RELEASED, papers.m2po_released, ()),
    ("prefix_ratio_grpo", {"prefix_gradient": "full"}, papers.prefix_ratio_grpo_full, ()),
    ("prefix_filter", {"filter_fraction": 0.2}, papers.prefix_filter, (0.2,)),
    ("bapo", RELEASED, papers.bapo_released, ()),
    *(("bapo", fields, partial(papers.bapo, **fields), ()) for fields in BAPO),
    *(("bapo", RELEASED | fields, partial(papers.bapo_released, **fields), ()) for fields in BAPO),
    ("cppo", dict(threshold=0.1, prefix_threshold=0.005, smallest_weight=0.2), papers.cppo, (0.1, 0.005, 0.2)),
    ("drpo", {"threshold": 0.1}, papers.drpo, (0.1,)),
    ("oapl", {"beta": 0.7}, papers.oapl, (0.7,)),
    *(
        (
            "mu_grpo",
            {"veto_scope": scope, "veto_threshold": 0.3, "ratio_min": 0.1, "ratio_max": 1.5},
            papers.mu_grpo,
            (scope, 0.3, 0.1, 1.5),
        )
        for scope in ("sequence", "suffix", "non_trigger_suffix", "trigger")
    ),
    ("dcpo", {"eps_high": 2.0, "ratio_max": 1.4}, papers.dcpo, (0.16, 2.0, 1.4)),
    ("dppo", {"threshold": 0.25, "ratio_max": 1.2}, papers.dppo, ("tv", 0.25, 1.2)),
    *((name, {"eps_low": 0.2, "eps_high": 0.4}, getattr(papers, name), (0.2, 0.4)) for name in SOFT),
    ("m2po", {"m2_threshold": 0.19}, papers.m2po, (0.19,)),
    ("topr", {"ratio_max": 0.5}, papers.topr, (0.5,)),
    ("ctpo", {"eps_low": 0.2, "eps_high": 0.3}, papers.ctpo, (0.2, 0.3)),
    ("decoupled_ppo", {"behaviour_weight_max": 1.05}, papers.decoupled_ppo, (1.05,)),
]
CASES = DEFAULTS | {
    f"{name}-{'-'.join(map(str, fields.values()))}": (
        OBJECTIVES[name](**fields),
        lambda rs, literal=literal, settings=settings: literal(rs, *settings),
    )
    for name, fields, literal, settings in SETTINGS
}


@cache
def batch_and_tokens(seed: int) -> tuple[TokenBatch, torch.Tensor, list[list[papers.Token]]]:
    """A batch, its log-probs in float64 [T], and its trained tokens by response. All cases share the autograd graph."""
    batch = random_batch(seed)
    precise = batch.logprobs.detach().double().requires_grad_()
    return batch, precise, papers.responses(batch, precise)


def describe(seeds: torch.Tensor) -> str:
    return ", ".join(f"seed {seed} ({KINDS[seed % len(KINDS)]})" for seed in seeds.unique().tolist())


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str, seeds: torch.Tensor) -> None:
    wrong = ~torch.isclose(ours, theirs, rtol=2e-5, atol=1e-6)
    assert not wrong.any(), f"{what}: {ours[wrong]} and {theirs[wrong]} in {describe(seeds[wrong])}"


def evaluate(objective: Objective, batches: list[TokenBatch], backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and kept tokens of all batches, concatenated.

    An objective without statistics of the batch treats each sequence alone, so all batches are evaluated as one.
    """
    together = batches if objective.needs_statistics else [TokenBatch.concatenate(batches)]
    terms = [objective(batch, backend=backend) for batch in together]
    assert all(t.loss.dtype == torch.float32 for t in terms)
    return torch.cat([t.loss for t in terms]), torch.cat([t.kept for t in terms])


@pytest.mark.parametrize("name", CASES)
def test_value_mask_and_gradient_equal_the_paper(name: str) -> None:
    objective, literal = CASES[name]
    batches, precise, values, kept = [], [], [], []
    for seed in SEEDS:
        batch, logprobs, rs = batch_and_tokens(seed)
        value, keeps = literal(rs)
        tokens = range(batch.logprobs.numel())
        batches.append(batch)
        precise.append(logprobs)
        values += [-value[i] if i in value else logprobs.new_zeros(()) for i in tokens]
        kept += [keeps.get(i, False) for i in tokens]
    expected, expected_kept = torch.stack(values), torch.tensor(kept)
    sizes = [batch.logprobs.numel() for batch in batches]
    weights = torch.cat([torch.linspace(0.5, 1.5, size) for size in sizes])
    if objective.couples_tokens:  # all tokens of a response need the same weight
        whole = TokenBatch.concatenate(batches)
        weights = torch.linspace(0.5, 1.5, whole.cu_seqlens.numel() - 1)[whole.sequence_ids]
    mask = torch.cat([batch.loss_mask for batch in batches])
    seeds = torch.tensor(SEEDS).repeat_interleave(torch.tensor(sizes))
    gradients = torch.autograd.grad((expected * weights).sum(), precise, retain_graph=True, allow_unused=True)
    theirs = torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(precise, gradients, strict=True)])
    for backend in BACKENDS:
        loss, ours_kept = evaluate(objective, batches, backend)
        (wrong,) = (ours_kept != expected_kept).nonzero(as_tuple=True)
        assert not len(wrong), f"{name}, {backend}: tokens of {describe(seeds[wrong])}"
        assert (loss[~mask] == 0).all()
        assert_close(loss.double(), expected.detach(), f"{name}, {backend}, loss", seeds)
        ours = torch.cat(torch.autograd.grad((loss * weights).sum(), [batch.logprobs for batch in batches]))
        assert_close(ours.double(), theirs, f"{name}, {backend}, gradient", seeds)
    assert int(expected_kept.sum()) > 300
    assert int((mask & ~expected_kept).sum()) > 6 or name.startswith((*SOFT, "oapl", "topr", "vespo"))


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_only_the_policy_receives_a_gradient(name: str, fields: dict[str, str]) -> None:
    batch, others = random_batch(0), ("rollout_logprobs", "advantages", "old_logprobs")
    batch = replace(batch, **{other: getattr(batch, other).clone().requires_grad_() for other in others})
    terms = OBJECTIVES[name](**fields)(batch)
    terms.loss.sum().backward()
    assert batch.logprobs.grad is not None and float(batch.logprobs.grad.abs().sum()) > 0
    assert not any(getattr(batch, other).grad is not None for other in others)
    assert not any(value.requires_grad for pair in terms.metrics.values() for value in pair)


@pytest.mark.parametrize(
    ("objective", "literal", "aggregation"),
    [
        (OBJECTIVES["gspo"](), papers.gspo_sequence, "sequence_mean"),
        (OBJECTIVES["oapl"](beta=0.7), partial(papers.oapl_sequence, beta=0.7), "token_mean"),
    ],
)
def test_tokens_have_the_gradient_of_the_objective_of_whole_responses(objective, literal, aggregation) -> None:
    """Eq. 5 of GSPO, one clipped ratio per response, and Eq. 3 of OAPL, its squared error."""
    for seed in range(40):
        batch = random_batch(seed, "continuous")
        precise = batch.logprobs.detach().double().requires_grad_()
        losses = literal(papers.responses(batch, precise))
        if not losses:
            continue
        (theirs,) = torch.autograd.grad(sum(losses), precise, allow_unused=True)
        weights = token_weights(batch.loss_mask, batch.cu_seqlens, aggregation)
        loss = (objective(batch).loss * weights).sum()
        (ours,) = torch.autograd.grad(loss, batch.logprobs)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        if aggregation == "sequence_mean":
            torch.testing.assert_close(loss.item(), sum(losses).item(), rtol=1e-5, atol=1e-6)


BOUNDS = {"paper": papers.bapo_bounds, "released": papers.bapo_released_bounds}


@pytest.mark.parametrize("variant", BOUNDS)
def test_bapo_with_an_unlimited_upper_bound(variant: str) -> None:
    """Table 6 has [1.2, inf]: the bound is where the loop stops, however far that is, or clips nothing."""
    found = []
    for seed in range(48):
        batch, _, rs = batch_and_tokens(seed)
        if max((t.rho_value for o in rs for t in o), default=0.0) > 50:  # the literal loop would take too many steps
            continue
        ends, low = torch.tensor([1.2, BEYOND]).double(), torch.tensor([0.6 if variant == "paper" else 0.9]).double()
        good, bad = contributions(batch, low, ends, variant == "paper", None)
        shares = good / (good + bad if variant == "paper" else bad + 1e-8)  # with the least and the largest upper bound
        target = float(shares.mean()) if seed % 3 and shares[1] > shares[0] + 1e-6 else 0.4
        low, high = BOUNDS[variant](rs, high_end=math.inf, positive_target=target)
        objective = OBJECTIVES["bapo"](variant=variant, high_end=math.inf, positive_target=target)
        for backend in BACKENDS:
            c_low, c_high, _ = objective.statistics(batch.detach(), None, backend)
            assert float(c_low) == pytest.approx(low, abs=1e-9), seed
            assert float(c_high) == pytest.approx(min(high, BEYOND), rel=1e-12), seed
        found.append(high)
    assert math.inf in found and any(1.21 < high < 50 for high in found)


@pytest.mark.parametrize("name", [name for name, (objective, _) in CASES.items() if objective.fused])
def test_fused_pass_has_the_metrics_of_the_definition(name: str) -> None:
    for seed in SEEDS[:48]:
        compare(CASES[name][0], random_batch(seed), "cpp", f"seed {seed} ({KINDS[seed % len(KINDS)]})")
