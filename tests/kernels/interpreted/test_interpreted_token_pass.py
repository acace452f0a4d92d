"""The Triton token pass, in Triton's interpreter, compared with the objectives' definitions or, in what only
shards have, with the C++ pass. A tile has 8 tokens here, so that the random responses end near its border."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from megarl.kernels.token_pass import Given, Rule, token_pass
from megarl.kernels.token_pass import triton_backend as kernels
from megarl.kernels.token_pass.language import RULES, Outcome, Sequence, Token, rule
from megarl.kernels.tokens import Tokens
from megarl.objectives import Objective
from megarl.objectives.parts.quantities import last_tie
from tests.kernels.test_token_pass import as_in_cpp, compare, given_values, make_batch
from tests.objectives.random_batches import KINDS, random_batch
from tests.objectives.test_against_papers import CASES as PAPERS

TILE = 8
CASES = {name: case for name, case in PAPERS.items() if case[0].fused}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", TILE)
    monkeypatch.setattr(kernels, "_STRETCH", tl.constexpr(2))  # three tiles are more than one stretch


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    """Two random batches per objective; all together have every kind, and a third of them NaN at untrained tokens."""
    first = 2 * list(CASES).index(name)
    for seed in (first, first + 1):
        compare(CASES[name][0], random_batch(seed), "triton", f"seed {seed} ({KINDS[seed % len(KINDS)]})")


def test_every_rule_is_compared_with_its_definition() -> None:
    batch = random_batch(0)
    rules = [objective.rule(objective.statistics(batch.detach())) for objective, _ in CASES.values()]
    assert {rule.function.name for rule in rules} == set(RULES)


BORDERS = [TILE - 1, TILE, TILE + 1, 0, 0, 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1, 0, 5 * TILE + 3, 0]


@pytest.mark.parametrize("name", ["mu_grpo-sequence-0.3-0.1-1.5", "minpro", "m2po", "topr"])
def test_responses_across_tiles_and_stretches(name: str) -> None:
    compare(CASES[name][0], make_batch(BORDERS), "triton")


@pytest.mark.parametrize("name", RULES)
def test_given_values_act_as_in_cpp(name: str) -> None:
    """What chunks of a context-parallel rank are told of the rest of their sequence has the same effect as in C++."""
    batch = make_batch([5, 9, 0, 8, 3])
    batch.advantages[:5], batch.loss_mask[:5] = -0.5, True  # token 2 of segment 0 is its trigger
    rule = Rule(RULES[name], (0.6, 1.4, 1.2, 0.9))
    as_in_cpp(rule, batch, "triton", given_values())


def test_a_quantity_of_its_own_is_given() -> None:
    def last_ratio(l, batch, parameters):
        return Sequence(l.double().exp()[(batch.cu_seqlens[1:] - 1).clamp(min=0)], None)

    @rule(last_ratio)
    def by_last_ratio(t: Token, s: Sequence) -> Outcome:
        return Outcome(s.value * t.advantage, s.value * t.advantage, ~t.clamped, t.never, t.never)

    class ByLastRatio(Objective):
        def rule(self, statistics):
            return Rule(by_last_ratio)

    compare(ByLastRatio(), make_batch([5, 1, 0, 11]), "triton")


def test_ties_are_masked_up_to_the_last_in_their_order() -> None:
    """A token whose |l| is the threshold is masked if it is the last tie to mask, and kept if it comes after that."""
    batch = make_batch([5, 9])
    l = (batch.logprobs - batch.rollout_logprobs).detach()
    inside = batch.loss_mask & (l * batch.advantages > 0) & (torch.arange(14) >= 5)
    tie = int(inside.nonzero()[1])
    kept = []
    for last in (tie, tie - 1):
        order = torch.tensor(2**44 - 1 - (1 << 22) - (last - 5))  # segment 1 begins at token 5
        rule = Rule(RULES["second_moment"], (float(l[tie].abs()), order))
        given = Given(index=last_tie(l, batch, rule.parameters).index.int())
        kept.append(bool(as_in_cpp(rule, batch, "triton", given).kept[tie]))
    assert kept == [False, True]


@pytest.mark.parametrize("name", ["clip_prefix", "clip_sequence_mean", "veto_suffix", "second_moment"])
def test_nan_and_infinity_at_trained_tokens_act_as_in_cpp(name: str) -> None:
    """A NaN makes the later prefix minima of its own sequence NaN, and no others."""
    batch = make_batch([6, 11, 4])
    rollout = batch.rollout_logprobs
    rollout[3], rollout[9], rollout[18] = torch.nan, -torch.inf, torch.inf
    batch.loss_mask[:] = True
    assert as_in_cpp(Rule(RULES[name], (0.3, 0.0, 0.5)), batch, "triton").sums.isnan().any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_give_empty_results(lengths: list[int]) -> None:
    tokens = Tokens.of(make_batch(lengths))
    result = token_pass(Rule(RULES["clip_token"], (0.8, 1.2)), tokens, backend="triton")
    assert result.loss.shape == (0,) and result.segment_sums.shape == (len(lengths), 2)
    assert not (result.sums.any() or result.segment_sums.any() or result.histograms.any())
