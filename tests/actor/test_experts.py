"""Grouped experts against Megatron-Core's SequentialMLP, which runs one expert after another."""

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.actor.experts import GroupedExperts, grouped_linear
from megarl.actor.model import transformer_config
from tests.actor.conftest import SHAPE, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")
HF = SHAPE | dict(
    model_type="qwen3_moe", num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, rope_theta=1e4,
    rope_scaling_factor=None, rotary_fraction=1.0,
)  # fmt: skip

KINDS = {"plain": HF, "biases": HF | dict(model_type="gpt_oss", swiglu_limit=0.1, sliding_window=None)}


def build_experts(count, kind="plain"):
    """`GroupedExperts` and a SequentialMLP with the same weights and, if the kind has them, biases."""
    config = transformer_config(KINDS[kind] | {"num_experts": count}, make_recipe())
    groups = get_default_pg_collection()
    grouped = GroupedExperts(count, config, groups)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    sequential = SequentialMLP(count, config, linears, groups)
    with torch.no_grad():
        for i, expert in enumerate(sequential.local_experts):
            grouped.weight1[i].copy_(expert.linear_fc1.weight)
            grouped.weight2[i].copy_(expert.linear_fc2.weight)
            # Megatron's MLP adds a bias in place, which autograd forbids for a view
            expert.linear_fc2.register_forward_hook(lambda module, inputs, output: (output[0].clone(), output[1]))
            for ours, linear in biases(grouped, expert):
                ours[i].copy_(torch.nn.init.normal_(linear.bias, std=0.1))
    return grouped, sequential


def biases(grouped, expert):
    """For both projections: the grouped biases [experts, outputs], and the linear layer of a SequentialMLP's expert."""
    if not grouped.config.add_bias_linear:
        return []
    both = (p.view(len(grouped.weight1), -1) for p in (grouped.bias1, grouped.bias2))
    return zip(both, (expert.linear_fc1, expert.linear_fc2), strict=True)


class Kernels(TorchDispatchMode):
    """Counts the operators that compute something, not those that only return a view of their input."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        return out


def run(experts, counts, seed=0):
    """Output, gradients of tokens and probs, and the number of operators of the forward and backward pass."""
    torch.manual_seed(seed)
    tokens = torch.randn(sum(counts), 32, requires_grad=True)
    probs = torch.rand(sum(counts), requires_grad=True)
    with Kernels() as kernels:
        output, bias = experts(tokens, torch.tensor(counts), probs)
        output.backward(torch.randn_like(output))
    assert bias is None
    return output, tokens.grad, probs.grad, kernels.count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[3, 0, 7, 2], [0, 0, 0, 5], [0, 0, 0, 0]])
def test_values_and_gradients_equal_sequential_mlp(counts, kind):
    grouped, sequential = build_experts(4, kind)
    *ours, _ = run(grouped, counts)
    *theirs, _ = run(sequential, counts)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for i, expert in enumerate(sequential.local_experts):
        for ours_w, linear in ((grouped.weight1, expert.linear_fc1), (grouped.weight2, expert.linear_fc2)):
            torch.testing.assert_close(ours_w.grad[i], linear.weight.grad, rtol=1e-5, atol=1e-7)
    if kind == "biases":
        for ours_b, name in ((grouped.bias1, "linear_fc1"), (grouped.bias2, "linear_fc2")):
            theirs_b = torch.stack([getattr(expert, name).bias.grad for expert in sequential.local_experts])
            torch.testing.assert_close(ours_b.grad.view_as(theirs_b), theirs_b, rtol=1e-5, atol=1e-6)
        assert float(theirs_b.abs().max()) > 0 or not sum(counts)


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_operators_does_not_grow_with_the_experts(kind):
    few, many = build_experts(4, kind)[0], build_experts(16, kind)
    *_, launches = run(many[0], [5] * 16)
    *_, one_by_one = run(many[1], [5] * 16)
    print(f"\n16 experts: {launches} operators, one expert after another {one_by_one}")
    assert launches == run(few, [5] * 4)[-1]
    assert 3 * launches <= one_by_one


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_has_one_tensor_per_expert_like_sequential_mlp(kind):
    grouped, sequential = build_experts(4, kind)
    metadata = {"singleton_local_shards": True, "dp_cp_group": torch.distributed.group.WORLD}

    def shards(experts):
        state = experts.sharded_state_dict("layer.experts.", (), metadata)
        built = [v.build() if hasattr(v, "build") else v for v in state.values()]
        return {s.key: s for s in nested_values(built) if not s.key.endswith("_extra_state")}

    ours, theirs = shards(grouped), shards(sequential)
    assert ours.keys() == theirs.keys()
    for key, shard in theirs.items():
        assert torch.equal(ours[key].data, shard.data), key
        assert ours[key].global_offset == shard.global_offset, key
        assert ours[key].global_shape == shard.global_shape, key
        assert ours[key].replica_id == shard.replica_id, key


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
