"""Metrics of experts, against routers evaluated by hand on the hidden states of transformers' model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.actor.packing import micro_batches
from megarl.actor.step import train_step
from megarl.objectives import build_objective
from tests.actor.conftest import make_hf_model
from tests.actor.test_step import CPU, build, make_samples, trained

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
def test_loads_and_entropies_are_those_of_the_trained_tokens(name, recompute, tmp_path):
    model = make_hf_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    actor, samples = build(tmp_path, actor={"recompute": recompute}), make_samples()
    loads, entropies = by_hand(model, samples, model.config.num_experts_per_tok)
    batches = micro_batches(samples, 24, CPU)
    assert len(batches) > 2
    first, second = (train_step(actor, batches, build_objective(name, {}), lr=0.0, detail=3) for _ in range(2))
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


def test_the_entropy_of_a_router_with_sigmoid_scores_is_that_of_their_shares(tmp_path):
    model = make_hf_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    actor, samples = build(tmp_path), make_samples()
    _, entropies = by_hand(model, samples, 1, sigmoid=True)
    found = train_step(actor, micro_batches(samples, 24, CPU), build_objective("mu_grpo", {}), lr=0.0)
    assert found["router/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
    assert "router/entropy/layer_01" not in found  # it is dense


def test_trained_tokens_differ_if_at_least_one_of_their_experts_does(tmp_path):
    model = make_hf_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    actor, samples = build(tmp_path, actor={"routing_replay": "engine"}), make_samples()
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    rng, given, differ, tokens = np.random.default_rng(0), [], 0, 0
    chosen = []
    for gate in gates:
        gate.register_forward_hook(
            lambda gate, inputs, _: chosen.append((inputs[0].flatten(0, -2) @ gate.weight.T).topk(2).indices)
        )
    experts = gates[0].weight.size(0)
    for sample in samples:
        chosen.clear()
        model(torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.response_tokens]))[None, :-1])
        own = torch.stack(chosen, 1).numpy()  # [tokens, layers, 2]
        first = own[:, 0, 0] + rng.integers(0, 2, len(own))  # in layer 1 half of the tokens get another expert
        changed = own.copy()
        others = np.array([[e for e in range(experts) if e not in row] for row in own[:, 0]])
        swap = first != own[:, 0, 0]
        changed[swap, 0, 0] = others[swap, 0]
        given.append(replace(sample, routed_experts=changed.astype(np.int8)))
        counted = np.append(np.zeros(len(own) - len(sample.response_tokens), bool), trained(sample))
        differ, tokens = differ + int(swap[counted].sum()), tokens + int(counted.sum())
    # the experts of layer 2 depend on those of layer 1, so only the first layer's are given: -1 is unknown
    for sample in given:
        sample.routed_experts[:, 1] = -1
    found = train_step(actor, micro_batches(given, 24, CPU), build_objective("mu_grpo", {}), lr=0.0)
    assert found["routing/tokens_differ"] == pytest.approx(differ / tokens)
    assert found["routing/disagreement"] == pytest.approx(differ / (2 * tokens))
