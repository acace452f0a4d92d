"""The backends that can evaluate an objective, checked before any process starts. A new one needs no fused rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.kernels.token_pass import Rule, has_rule
from megarl.kernels.token_pass.language import Outcome, RuleFunction, Sequence, Token, where
from megarl.objectives import OBJECTIVES, Objective, build_objective
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms
from tests.objectives.random_batches import VARIANTS, random_batch


@dataclass(frozen=True)
class HalfReinforce(Objective):
    """The least that a new objective must define, here rho A / 2."""

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        return make_terms(self, batch, -l.exp() * batch.advantages / 2, ~clamped, l, clamped, {})


def half(t: Token, s: Sequence) -> Outcome:
    value = 0.5 * t.ratio * t.advantage
    return Outcome(value, where(t.clamped, 0.0, value), ~t.clamped, t.never, t.never)


@dataclass(frozen=True)
class WithoutKernels(HalfReinforce):
    """An objective whose rule the compiled kernels do not have, since they were built before."""

    def rule(self, statistics: Any) -> Rule:
        return Rule(RuleFunction(half, "none"))


# the fused pass does not compute what rules for these would need: prefix sums, the gradient of a minimum
WITHOUT_RULES = {
    "cppo": {},
    "ctpo": {},
    "full_prefix": {},
    "prefix_filter": {},
    "trm": {},
    "prefix_ratio_grpo": {"prefix_gradient": "full"},
    "half": {},
    "unknown_rule": {},
}


@pytest.mark.parametrize("name", WITHOUT_RULES)
def test_fused_backends_evaluate_the_definition_of_an_objective_without_a_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "half", HalfReinforce)
    monkeypatch.setitem(OBJECTIVES, "unknown_rule", WithoutKernels)
    objective = build_objective(name, WITHOUT_RULES[name] | {"opsm": {}})
    batch = random_batch(0)
    expected, found = objective(batch), objective(batch, backend="cpp")
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.kept, expected.kept)
    assert {key: [float(x) for x in pair] for key, pair in found.metrics.items()} == {
        key: [float(x) for x in pair] for key, pair in expected.metrics.items()
    }


@pytest.mark.parametrize(("name", "fields"), [case for case in VARIANTS if WITHOUT_RULES.get(case[0]) != {}])
def test_every_other_objective_has_a_rule_on_every_backend(name: str, fields: dict[str, str]) -> None:
    """CPU and CUDA share the header with the rules, so the CPU's library answers for both."""
    objective = build_objective(name, fields)
    function = objective.rule(objective.statistics(random_batch(0).detach())).function
    assert objective.fused and all(has_rule(function, backend) for backend in ("cpp", "triton"))


@pytest.mark.parametrize("option", ["truncated_importance", "icepop", "dual_clip"])
def test_options_that_weight_single_tokens_are_refused_if_the_objective_couples_tokens(option: str) -> None:
    build_objective("prefix_ratio_grpo", {option: {}})
    with pytest.raises(UserError, match=f"{option} weights each token by itself.*PrefixRatioGrpo"):
        build_objective("prefix_ratio_grpo", {"prefix_gradient": "full", option: {}})
    build_objective("prefix_ratio_grpo", {"prefix_gradient": "full", "opsm": {}, "kl": {}})
