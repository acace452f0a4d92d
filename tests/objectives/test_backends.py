"""The backends that can evaluate an objective, checked before any process starts. A new one needs no fused rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from tests.helpers import ROOT
from tests.objectives.random_batches import random_batch


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


def test_a_new_objective_takes_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "half", HalfReinforce)
    objective = build_objective("half", {"aggregation": "sequence_mean", "opsm": {}})
    half, whole = build_objective("half", {}), build_objective("reinforce", {})
    for seed in range(16):
        batch = random_batch(seed)
        torch.testing.assert_close(half(batch).loss, whole(batch).loss / 2)
        assert objective(batch).metrics.keys() > whole(batch).metrics.keys()


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


@pytest.mark.parametrize("options", [{}, {"opsm": {}}])
@pytest.mark.parametrize("name", WITHOUT_RULES)
def test_fused_backends_evaluate_the_definition_of_an_objective_without_a_rule(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "half", HalfReinforce)
    monkeypatch.setitem(OBJECTIVES, "unknown_rule", WithoutKernels)
    objective = build_objective(name, WITHOUT_RULES[name] | options)
    batch = random_batch(0)
    expected, found = objective(batch), objective(batch, backend="cpp")
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.kept, expected.kept)
    assert {key: [float(x) for x in pair] for key, pair in found.metrics.items()} == {
        key: [float(x) for x in pair] for key, pair in expected.metrics.items()
    }


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in WITHOUT_RULES or WITHOUT_RULES[name]])
def test_every_other_objective_has_a_rule_on_every_backend(name: str, variant: str) -> None:
    """CPU and CUDA share the header with the rules, so the CPU's library answers for both."""
    objective = build_objective(name, {"variant": variant} if name in ("m2po", "bapo") else {})
    assert isinstance(objective, Objective)
    function = objective.rule(objective.statistics(random_batch(0).detach())).function
    assert objective.fused and all(has_rule(function, backend) for backend in ("cpp", "triton"))


@pytest.mark.parametrize("option", ["truncated_importance", "icepop", "dual_clip"])
def test_options_that_weight_single_tokens_are_refused_if_the_objective_couples_tokens(option: str) -> None:
    build_objective("prefix_ratio_grpo", {option: {}})
    with pytest.raises(UserError, match=f"{option} weights each token by itself.*PrefixRatioGrpo"):
        build_objective("prefix_ratio_grpo", {"prefix_gradient": "full", option: {}})
    build_objective("prefix_ratio_grpo", {"prefix_gradient": "full", "opsm": {}, "kl": {}})


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_the_call_refuses_a_batch_of_wrong_shapes(backend: str) -> None:
    batch = random_batch(0)
    for options in ({}, {"opsm": {}}):
        with pytest.raises(UserError, match="advantages has 2 tokens"):
            build_objective("grpo", options)(replace(batch, advantages=torch.ones(2)), backend=backend)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_an_infinite_ratio_max_clips_nothing(backend: str) -> None:
    endless, far = (build_objective("mu_grpo", {"ratio_max": high}) for high in (float("inf"), 1e30))
    for seed in range(4):
        batch = random_batch(seed)
        torch.testing.assert_close(endless(batch, backend=backend).loss, far(batch, backend=backend).loss)


def test_no_module_imports_an_objective() -> None:
    """The registry loads them by name; dapo.py alone imports one, from which it derives."""
    sources = {path: path.read_text() for path in (ROOT / "megarl").rglob("*.py")}
    for name, kind in OBJECTIVES.items():
        knowing = {path.name for path, text in sources.items() if f" import {kind.__name__}\n" in text}
        assert knowing <= {"dapo.py"}, name
