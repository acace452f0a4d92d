"""Grouped experts against a loop over them."""

import pytest
import torch

from megarl.actor.dispatch import get_default_pg_collection
from megarl.actor.experts import GroupedExperts, grouped_linear
from megarl.actor.model import transformer_config
from tests.actor.conftest import EXPERTS, make_recipe
from tests.kernels.test_token_pass import Launches

pytestmark = pytest.mark.usefixtures("one_rank")
LIMIT = 0.1  # low enough to clamp many activations
KINDS = {"plain": EXPERTS, "biases": EXPERTS | dict(model_type="gpt_oss", swiglu_limit=LIMIT, sliding_window=None)}


def build_experts(count, kind="plain"):
    torch.manual_seed(0)
    config = transformer_config(KINDS[kind] | {"num_experts": count}, make_recipe())
    experts = GroupedExperts(count, config, get_default_pg_collection())
    for name, parameter in experts.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if "bias" in name else 0.02)
    return experts


def one_after_another(experts, tokens, counts, probs):
    """As `GroupedExperts`, with a loop; with biases the activation is the clamped one of gpt-oss."""
    rows, n = [], len(experts.weight1)
    biased = experts.config.add_bias_linear
    first, second = (b.view(n, -1) for b in (experts.bias1, experts.bias2)) if biased else ([0] * n, [0] * n)
    for i, (x, p) in enumerate(zip(tokens.split(counts), probs[:, None].split(counts), strict=True)):
        gate, up = (x @ experts.weight1[i].t() + first[i]).chunk(2, 1)
        if biased:
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            inner = gate * (1.702 * gate).sigmoid() * (up + 1)
        else:
            inner = torch.nn.functional.silu(gate) * up
        rows.append((inner * p) @ experts.weight2[i].t() + second[i] * p)
    return torch.cat(rows)


def run(way, experts, counts):
    """Output, gradients of tokens, probs and parameters, and the number of operators of both passes."""
    torch.manual_seed(1)
    inputs = [torch.randn(sum(counts), 32, requires_grad=True), torch.rand(sum(counts), requires_grad=True)]
    with Launches() as launches:
        output = way(experts, inputs[0], counts, inputs[1])
        gradients = torch.autograd.grad(output, [*inputs, *experts.parameters()], torch.randn_like(output))
    return [output, *gradients], launches.count


def grouped(experts, tokens, counts, probs):
    return experts(tokens, torch.tensor(counts), probs)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[3, 0, 7, 2], [0, 0, 0, 5], [0, 0, 0, 0]])
def test_values_and_gradients_equal_those_of_a_loop_over_the_experts(counts, kind):
    experts = build_experts(4, kind)
    ours, theirs = (run(way, experts, counts)[0] for way in (grouped, one_after_another))
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7 if place < 5 else 1e-6)  # biases come last
    assert not sum(counts) or all(float(b.abs().max()) > 0 for b in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_operators_does_not_grow_with_the_experts(kind):
    few, many = ([5] * n for n in (4, 16))
    experts = build_experts(16, kind)
    launches, one_by_one = (run(way, experts, many)[1] for way in (grouped, one_after_another))
    assert launches == run(grouped, build_experts(4, kind), few)[1]
    assert 3 * launches <= one_by_one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 24), (12, 20), (7, 5)])
def test_grouped_linear_supports_any_width(dtype, inputs, outputs):
    """Also rows whose size is not a multiple of 16 bytes, which `grouped_mm` needs."""
    torch.manual_seed(0)
    tokens = torch.randn(9, inputs).to(dtype).requires_grad_()
    weight = torch.randn(3, outputs, inputs).to(dtype).requires_grad_()
    gradient = torch.randn(9, outputs).to(dtype)
    products = grouped_linear(tokens, weight, torch.tensor([4, 4, 9], dtype=torch.int32))
    ours = [products, *torch.autograd.grad(products, (tokens, weight), gradient)]
    expected = torch.cat([tokens[:4] @ weight[0].t(), tokens[4:] @ weight[2].t()])
    theirs = [expected, *torch.autograd.grad(expected, (tokens, weight), gradient)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert float(ours[2][1].abs().max()) == 0
