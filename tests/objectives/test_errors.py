"""Wrong input: one message that names tensor and shape or dtype, or field, value and range."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives import OBJECTIVES, build_objective
from tests.kernels.test_token_pass import make_batch
from tests.objectives.random_batches import VARIANTS, random_batch


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_logprobs": torch.zeros(4)}, ["rollout_logprobs", "4", "5"]),
        ({"loss_mask": torch.ones(6, dtype=torch.bool)}, ["loss_mask", "6", "5"]),
        ({"loss_mask": torch.ones(5)}, ["loss_mask", "float32", "bool"]),
        ({"advantages": torch.ones(5, dtype=torch.float16)}, ["advantages", "float16", "float32"]),
        ({"logprobs": torch.zeros(5, 1)}, ["logprobs", "(5, 1)"]),
        ({"advantages": None}, ["advantages", "None"]),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, ["cu_seqlens", "float32", "int32"]),
        ({"sequence_index": torch.tensor([0])}, ["sequence_index", "(1,)", "[2]"]),
    ],
)
def test_error_names_what_is_wrong_with_a_batch(changes: dict[str, Any], words: list[str]) -> None:
    for options, backend in product(({}, {"opsm": {}}), ("torch", "cpp")):
        objective = build_objective("grpo", options)
        objective(make_batch([2, 3]), backend=backend)
        with pytest.raises(UserError) as error:
            objective(replace(make_batch([2, 3]), **changes), backend=backend)
        assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("grop", {}, ["'grop'", "did you mean 'grpo'"]),
        ("grpo", {"eps_lo": 0.1}, ["'grpo'", "'eps_lo'", "'eps_low'"]),
        ("grpo", {"eps_low": 1.5}, ["eps_low", "1.5", "[0, 1]"]),
        ("grpo", {"eps_low": "0.2"}, ["eps_low", "'0.2'", "number"]),
        ("grpo", {"aggregation": "mean"}, ["aggregation", "'mean'", "sequence_mean", "token_mean"]),
        ("bapo", {"low_start": 0.95}, ["low_end", "0.9", "low_start", "0.95"]),
        ("bapo", {"positive_target": 1.2}, ["positive_target", "1.2", "[0, 1]"]),
        ("grpo", {"kl": 0.1}, ["objective.kl", "0.1", "table"]),
        ("grpo", {"kl": {"coef": 0.1}}, ["objective.kl", "coef", "coefficient"]),
        ("grpo", {"kl": {"kind": "k4"}}, ["kind", "k4", "k3, k1, k2"]),
        ("grpo", {"icepopp": {}}, ["icepopp", "icepop"]),
        ("cispo", {"dual_clip": {}}, ["dual_clip", "Cispo"]),
        ("grpo", {"icepop": {}, "truncated_importance": {}}, ["icepop", "truncated_importance"]),
        ("grpo", {"dual_clip": {"clip_ratio_c": 0.5}}, ["clip_ratio_c", "0.5", "[1, inf]"]),
        *(
            ("prefix_ratio_grpo", {"prefix_gradient": "full", option: {}}, [f"{option} weights each token by itself"])
            for option in ("truncated_importance", "icepop", "dual_clip")
        ),
    ],
)
def test_error_names_the_wrong_objective_field_or_option(name: str, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        build_objective(name, fields)
    assert all(word in str(error.value) for word in words), str(error.value)


# in these a token's loss depends on the others of its response or batch
COUPLED = ("bapo", "cppo", "ctpo", "full_prefix", "gspo", "m2po", "minpro", "mu_grpo", "oapl", "prefix_filter",
           "prefix_ratio_grpo", "topr", "trm", "vespo")  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_log_probs_of_minus_infinity_give_a_finite_loss_and_no_gradient(name: str, backend: str) -> None:
    objective = build_objective(name, {})
    for seed in range(9):
        batch, names = random_batch(seed), ("logprobs", "rollout_logprobs")[seed % 3 % 2 : seed % 3 + 1]
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


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_a_nan_at_a_trained_token_reaches_the_later_tokens_of_its_response_alone(backend: str) -> None:
    """By the smallest ratio before them; the token after it is not trained."""
    batch, place = make_batch([3, 4, 2]), torch.arange(9)
    logprobs = torch.where(place == 4, math.nan, batch.logprobs.detach()).requires_grad_()
    batch = replace(batch, logprobs=logprobs, loss_mask=place != 5)
    loss = build_objective("minpro", {})(batch, backend=backend).loss
    assert loss.isnan().nonzero().flatten().tolist() == [4, 6]


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_an_empty_batch_has_an_empty_loss_and_no_counts(name: str, fields: dict[str, str]) -> None:
    """A rank without tokens evaluates the objective too: its loss is empty and its counts are 0."""
    terms = build_objective(name, fields)(make_batch([]))
    assert terms.loss.shape == terms.kept.shape == (0,)
    assert all(pair[0].tolist() == 0 and pair[1].tolist() == 0 for pair in terms.metrics.values())
    assert int(terms.histograms["ratio"].sum()) == 0


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_no_objective_waits_for_the_device(name: str, fields: dict[str, str]) -> None:
    """Fake tensors have no data, so reading a value on the host raises an error."""
    objective, batch = build_objective(name, fields), random_batch(0, "continuous")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        batch = TokenBatch(**{k: mode.from_tensor(v) for k, v in vars(batch).items() if isinstance(v, torch.Tensor)})
        assert objective(batch, objective.statistics(batch.detach())).loss.shape == batch.logprobs.shape
