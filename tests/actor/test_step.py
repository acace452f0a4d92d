"""An update through Megatron equals the same update written out with transformers and torch."""

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.actor.frozen import FrozenPolicy
from megarl.actor.hf import export_hf
from megarl.actor.nonfinite import NonFiniteUpdate
from megarl.actor.packing import Sample, micro_batches
from megarl.actor.step import Actor, train_step
from megarl.batch import TokenBatch
from megarl.objectives import build_objective
from tests.actor.conftest import make_hf_model, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def make_samples(count=7, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = rng.integers(2, 67, rng.integers(1, 6)), rng.integers(2, 67, rng.integers(1, 12))
        logprobs = -4 + rng.normal(size=len(response)).astype(np.float32)
        mask = rng.random(len(response)) < 0.6  # with tokens of tools between turns, which have no loss
        mask[-1] = True
        own = mask if i % 2 else None
        samples.append(Sample(prompt, response, logprobs, float(rng.normal()), trained=i != 3, loss_mask=own))
    return samples


def build(path, **tables):
    return Actor.build(make_recipe(path, **tables), path, CPU)


def update(actor, samples, objective="mu_grpo", budget=24, lr=1e-2, **fields):
    """The metrics of an update. fields: those of the objective."""
    return train_step(actor, micro_batches(samples, budget, CPU), build_objective(objective, fields), lr=lr)


def updates(actor, numbers):
    """The metrics of updates, each with samples of its own."""
    return [update(actor, make_samples(seed=n), budget=64) for n in numbers]


def trained(sample):
    """[R] bool, the response tokens that have a loss."""
    own = np.ones(len(sample.response_tokens), bool) if sample.loss_mask is None else sample.loss_mask
    return own & sample.trained


def reference_update(model, samples, objective, recipe, lr):
    """Update ``model`` in plain torch, one sequence at a time and without packing; returns loss and gradient norm.

    As in megarl, vectors have no weight decay.
    """
    pieces, offsets = [], [0]
    for s in samples:
        tokens = torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens]))[None]
        log_p = (model(tokens).logits[0, :-1] / recipe.rollout.temperature).log_softmax(-1)
        pieces.append(log_p.gather(1, tokens[0, 1:, None])[-len(s.response_tokens) :, 0])
        offsets.append(offsets[-1] + len(s.response_tokens))
    lengths = np.diff(offsets)
    batch = TokenBatch(
        logprobs=torch.cat(pieces),
        rollout_logprobs=torch.from_numpy(np.concatenate([s.rollout_logprobs for s in samples])),
        advantages=torch.from_numpy(np.repeat(np.array([s.advantage for s in samples], np.float32), lengths)),
        loss_mask=torch.from_numpy(np.concatenate([trained(s) for s in samples])),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
    )
    terms = objective(batch)
    if objective.aggregation == "sequence_mean":
        means = [
            terms.loss[a:b][batch.loss_mask[a:b]].mean()
            for a, b, s in zip(offsets, offsets[1:], samples, strict=False)
            if s.trained
        ]
        loss = torch.stack(means).mean()
    else:
        loss = terms.loss.sum() / batch.loss_mask.sum()
    loss.backward()
    parameters = list(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.optimizer.clip_grad)
    decay = recipe.optimizer.weight_decay
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps)
    optimizer.step()
    return float(loss), float(norm)


@pytest.mark.parametrize(
    ("family", "name", "fields", "budget"),
    [
        ("qwen3_moe", "grpo", {"aggregation": "sequence_mean"}, 24),
        ("qwen3_moe", "reinforce", {}, 10_000),
        ("qwen3", "mu_grpo", {}, 10_000),
        ("llama", "mu_grpo", {}, 24),
        ("glm4_moe_lite", "reinforce", {}, 24),
        ("minimax_m2", "reinforce", {}, 24),
        ("qwen3_5", "reinforce", {}, 24),
    ],
)
def test_update_equals_plain_torch(family, name, fields, budget, tmp_path):
    model = make_hf_model(family)
    model.save_pretrained(tmp_path / "in")
    tables = {"rollout": {"temperature": 0.8}, "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}}
    actor = build(tmp_path / "in", **tables)
    samples, objective = make_samples(), build_objective(name, fields)
    batches = micro_batches(samples, budget, CPU)
    assert (len(batches) > 2) == (budget == 24)

    metrics = train_step(actor, batches, objective, lr=1e-3)
    loss, norm = reference_update(model, samples, objective, actor.recipe, lr=1e-3)
    # terms of size 1 nearly cancel in the loss: their float32 rounding is not small beside it
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=torch.finfo(torch.float32).eps)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    export_hf(actor.models, tmp_path / "out", tmp_path / "in", 1)
    model.save_pretrained(tmp_path / "expected")
    before = load_file(tmp_path / "in/model.safetensors")
    got, expected = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "expected"))
    for key, value in expected.items():
        assert (got[key] - value).abs().max() < 2e-6, key
        fixed = ("expert", "e_score_correction_bias", "model.visual.")
        assert not torch.equal(value, before[key]) or any(part in key for part in fixed), key


def test_the_learning_rate_follows_the_effective_sample_size(saved_model):
    plain, scaled = (
        update(build(saved_model("qwen3"), optimizer={"ess_scaling": scaling}), make_samples(), "reinforce", lr=1e-3)
        for scaling in (False, True)
    )
    assert "ess/responses" not in plain and 0 < scaled["ess/responses"] < 0.9
    assert scaled["lr"] == pytest.approx(1e-3 * scaled["ess/responses"] ** 0.5)
    assert scaled["loss"] == plain["loss"] and plain["lr"] == 1e-3


@pytest.mark.parametrize("tensor", ["rollout_logprobs", "advantages", "logprobs"])
def test_non_finite_updates_are_not_applied(tensor, saved_model):
    actor, samples = build(saved_model("qwen3")), make_samples()
    index = next(i for i, s in enumerate(samples) if s.trained and len(s.response_tokens) > 4)
    length = len(samples[index].response_tokens)
    if tensor == "rollout_logprobs":
        samples[index].rollout_logprobs[2] = math.nan
    elif tensor == "advantages":
        samples[index] = replace(samples[index], advantage=math.inf)
    else:
        with torch.no_grad():
            actor.models[0].decoder.final_layernorm.weight[0] = math.nan
    before = [parameter.detach().clone() for parameter in actor.models[0].parameters()]
    with pytest.raises(NonFiniteUpdate, match=f"{tensor} is not finite") as error:
        update(actor, samples, "reinforce")
    for old, new in zip(before, actor.models[0].parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=0, equal_nan=True)
    offenders = error.value.offenders
    assert {o.tensor for o in offenders} == {tensor}
    if tensor == "logprobs":
        assert [o.sequence for o in offenders] == [i for i, s in enumerate(samples) if s.trained]
        return
    (offender,) = offenders
    assert offender.sequence == index
    assert offender.positions == ([2] if tensor == "rollout_logprobs" else list(range(length)))
    assert len(offender.logprobs) == length and all(map(math.isfinite, offender.logprobs.values()))
    # nothing of the refused update is left: the next one equals that of a new actor
    assert updates(actor, [1]) == updates(build(saved_model("qwen3")), [1])


def test_the_biases_of_routers_move_with_applied_updates_alone(saved_model):
    actor, samples = build(saved_model("glm4_moe"), megatron={"moe_router_bias_update_rate": 0.125}), make_samples()
    biases = [buffer for name, buffer in actor.models[0].named_buffers() if name.endswith("expert_bias")]
    before = [bias.clone() for bias in biases]
    broken = [replace(sample, advantage=math.nan) for sample in samples]
    with pytest.raises(NonFiniteUpdate):
        update(actor, broken)
    assert biases and all(map(torch.equal, biases, before))
    update(actor, samples)
    assert not any(map(torch.equal, biases, before))


def test_a_gradient_that_is_not_finite_by_itself_is_named_by_its_parameter(saved_model):
    actor = build(saved_model("qwen3"))
    name, broken = list(actor.models[0].named_parameters())[3]
    broken.register_hook(lambda gradient: gradient * math.nan)
    trained = len(list(actor.models[0].parameters()))
    where = f"gradient norm is nan, not finite in 1 of {trained} parameters, the first being {name}; .* gradient is not"
    with pytest.raises(NonFiniteUpdate, match=where):
        update(actor, make_samples(), "reinforce")


def test_statistics_are_those_of_the_optimizer_batch_or_of_each_micro_batch(saved_model):
    def loss(scope, budget):
        actor = build(saved_model("qwen3"), actor={"statistics_scope": scope})
        return update(actor, make_samples(12), "m2po", budget, m2_threshold=0.3)["loss"]

    whole = loss("exact", 10_000)
    assert loss("exact", 24) == pytest.approx(whole, rel=1e-5)
    assert loss("micro", 24) != pytest.approx(whole, rel=1e-5)


def test_frozen_policies_keep_the_log_probs_of_the_beginning(saved_model):
    """The KL to a reference is 0 at first, and then as large as the log-probs have changed; the mismatch between actor
    and engine does not change while the policy does."""
    model_dir = saved_model("qwen3")
    actor, options = build(model_dir), {"kl": {"coefficient": 0.1}, "truncated_importance": {"maximum": 1e6}}
    actor.frozen = [FrozenPolicy.build((name,), actor.recipe, model_dir) for name in ("ref_logprobs", "old_logprobs")]
    first, second = (update(actor, make_samples(12), "reinforce", 60, **options) for _ in range(2))
    plain = update(build(model_dir), make_samples(12), "reinforce", 60)
    assert abs(first["kl_ref/k3"]) < 1e-9 and second["kl_ref/k3"] > 1e-4
    moved = second["kl/k1"] - first["kl/k1"]  # mean of -(log pi - log pi_rollout)
    assert second["kl_ref/k1"] == pytest.approx(-moved, rel=1e-4)
    assert first["mismatch/mean"] == second["mismatch/mean"]
    assert first["mismatch/mean"] == pytest.approx(plain["ratio/mean"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_an_actor_that_is_dropped_is_freed(saved_model):
    actor = build(saved_model("qwen3_moe"))
    model = weakref.ref(actor.models[0])
    updates(actor, [0])
    del actor
    gc.collect()
    assert model() is None


def test_norms_are_recomputed_without_a_compiler(saved_model, monkeypatch):
    """Megatron-Core 0.19 has a C++ extension for it, which it compiles in the first backward pass."""
    monkeypatch.setattr("megatron.core.tensor_parallel.random.load_inline", None, raising=False)
    stored, recomputed = (
        update(build(saved_model("qwen3"), actor={"recompute": parts}), make_samples())
        for parts in ("none", ["layernorm"])
    )
    assert recomputed["grad_norm"] == pytest.approx(stored["grad_norm"], rel=1e-6)


def test_fused_functions_are_not_compiled_on_a_cpu_even_if_they_were_imported_before():
    """Compiling one takes as long as several updates of a small model."""
    from megatron.core.transformer.moe.router import TopKRouter

    assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable")
