"""Metrics of experts, against routers evaluated by hand on the hidden states of transformers' model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.actor.frozen import FrozenPolicy
from megarl.actor.packing import micro_batches
from megarl.actor.step import train_step, with_proximal
from megarl.objectives import build_objective
from tests.actor.conftest import make_hf_model
from tests.actor.test_step import CPU, build, make_samples, trained, update

pytestmark = pytest.mark.usefixtures("one_rank")


def by_hand(model, samples, top_k, sigmoid=False):
    """[layers, experts] choices of the inputs whose label has a loss, and the mean entropy of each layer's router."""
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    seen = [[] for _ in gates]
    for gate, own in zip(gates, seen, strict=True):
        gate.register_forward_hook(lambda _, inputs, __, own=own: own.append(inputs[0].flatten(0, -2)))
    counted = []
    for sample in samples:
        tokens = np.concatenate([sample.prompt_tokens, sample.response_tokens])
        model(torch.from_numpy(tokens)[None, :-1])
        counted += [False] * (len(sample.prompt_tokens) - 1) + trained(sample).tolist()
    loads, entropies = [], []
    for gate, states in zip(gates, seen, strict=True):
        logits = (torch.cat(states)[counted] @ gate.weight.T).detach()
        p = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if sigmoid else logits.softmax(1)
        loads.append(torch.bincount(p.topk(top_k).indices.flatten(), minlength=p.size(1)).tolist())
        entropies.append(float(-(p * p.log()).sum(1).mean()))
    return loads, entropies


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["mu_grpo", "m2po"])  # the second makes another forward pass first
def test_loads_and_entropies_are_those_of_the_trained_tokens(name, recompute, saved_model):
    model = make_hf_model("qwen3_moe")
    actor, samples = build(saved_model("qwen3_moe"), actor={"recompute": recompute}), make_samples()
    loads, entropies = by_hand(model, samples, model.config.num_experts_per_tok)
    batches = micro_batches(samples, 24, CPU)
    assert len(batches) > 2
    first, second = (train_step(actor, batches, build_objective(name, {}), lr=0.0, detail=True) for _ in range(2))
    assert first["experts_load"] == second["experts_load"] == {"layers": [1, 2], "counts": loads}
    largest = [max(row) * len(row) / sum(row) for row in loads]
    assert first["experts/largest_load"] == pytest.approx(sum(largest) / 2)
    unused = sum(count == 0 for row in loads for count in row) / sum(map(len, loads))
    assert first["experts/unused_fraction"] == pytest.approx(unused)
    for layer in (1, 2):
        assert first[f"experts/largest_load/layer_{layer:02d}"] == pytest.approx(largest[layer - 1])
        assert first[f"router/entropy/layer_{layer:02d}"] == pytest.approx(entropies[layer - 1], rel=1e-5)
        assert 0 < entropies[layer - 1] < math.log(len(loads[0]))
    assert first["router/entropy"] == pytest.approx(sum(entropies) / 2, rel=1e-5)
    assert "experts_load" not in train_step(actor, batches, build_objective(name, {}), lr=0.0)


def test_the_entropy_of_a_router_with_sigmoid_scores_is_that_of_their_shares(saved_model):
    samples = make_samples()
    _, entropies = by_hand(make_hf_model("deepseek_v3"), samples, 1, sigmoid=True)
    found = update(build(saved_model("deepseek_v3")), samples, lr=0.0)
    assert found["router/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
    assert "router/entropy/layer_01" not in found  # it is dense


def test_trained_tokens_differ_if_at_least_one_of_their_experts_does(saved_model):
    """Half of the tokens are given another expert in layer 1; those of layer 2 depend on it, so they are unknown."""
    model, rng, given, chosen, differ, tokens = make_hf_model("qwen3_moe"), np.random.default_rng(0), [], [], 0, 0
    model.model.layers[0].mlp.gate.register_forward_hook(
        lambda gate, inputs, _: chosen.append((inputs[0].flatten(0, -2) @ gate.weight.T).topk(2).indices.numpy())
    )
    for sample in make_samples():
        model(torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.response_tokens]))[None, :-1])
        experts = np.full((len(sample), 2, 2), -1, np.int8)
        swap, experts[:, 0] = rng.random(len(sample)) < 0.5, chosen[-1]
        experts[swap, 0, 0] = [min({0, 1, 2} - set(row)) for row in chosen[-1][swap].tolist()]
        given.append(replace(sample, routed_experts=experts))
        counted = np.append(np.zeros(len(sample) - len(sample.response_tokens), bool), trained(sample))
        differ, tokens = differ + int(swap[counted].sum()), tokens + int(counted.sum())
    found = update(build(saved_model("qwen3_moe"), actor={"routing_replay": "engine"}), given, lr=0.0)
    assert found["routing/tokens_differ"] == pytest.approx(differ / tokens)
    assert found["routing/disagreement"] == pytest.approx(differ / (2 * tokens))


def test_recomputed_log_probs_of_the_behaviour_policy_replay_the_engines_experts(saved_model):
    """As the updates do: else the ratio to them would not be 1 before the first update. A reference replays none."""
    model, rng = saved_model("qwen3_moe"), np.random.default_rng(0)
    actor = build(model, actor={"routing_replay": "engine"})
    experts = [rng.random((len(sample), 2, 4)).argsort(2)[..., :2].astype(np.int8) for sample in make_samples()]
    samples = [replace(sample, routed_experts=own) for sample, own in zip(make_samples(), experts, strict=True)]
    batches = micro_batches(samples, 24, CPU)
    plain = [replace(batch, routed_experts=None) for batch in batches]
    for field, same in (("old_logprobs", batches), ("ref_logprobs", plain)):
        frozen = FrozenPolicy.build((field,), actor.recipe, model)
        for annotated, right in zip(frozen.annotate(batches), with_proximal(actor, same), strict=True):
            assert torch.equal(getattr(annotated.batch, field), right.batch.old_logprobs)


def test_the_router_multiplies_in_float32_without_transformer_engine():
    """As on GPUs, where the weights are bfloat16 and ``moe_router_dtype`` is float32."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    tokens, weight = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (5, 4))
    logits = router_gating_linear(tokens, weight, None, torch.float32)
    logits.backward(torch.ones_like(logits))
    assert torch.equal(logits, tokens.float() @ weight.float().t())
    assert torch.equal(weight.grad, tokens.float().sum(0).expand(4, 8).bfloat16())
    assert tokens.grad.dtype == torch.bfloat16
