"""The experts of a layer as two grouped matrix products, on every device, without a Python loop over experts."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.kernels.weight_gradient import add_group_products, added, main_grad
from megarl.kernels.weighted_glu import Glu, weighted_glu

QUICK_GELU = 1.702  # x sigmoid(1.702 x), Hendrycks and Gimpel 2016, arXiv 1606.08415
_ALIGNMENT = 16  # bytes; `grouped_mm` needs rows whose size is a multiple of this
# from this compute capability on, torch 2.13 leaves the weight gradient of a group without rows unwritten
# (pytorch#172439, #193633)
_UNWRITTEN_FROM = (10, 0)


class GroupedExperts(MegatronModule):
    """Gated experts with Megatron's interface.

    weight1: [experts of this rank, 2 F, hidden], rows of the gate before those of up; weight2: [experts of this rank,
    hidden, F]. F is this rank's part of an expert's width under expert tensor parallelism. bias1 and bias2, in models
    with biases, are flat tensors of all experts' biases, because Megatron's optimizer does not decay parameters of one
    dimension. Checkpoints have one tensor an expert, under the names of Megatron's SequentialMLP and TEGroupedMLP.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.groups, self.backend = pg_collection, "torch"  # of the experts' kernels; `build_model` chooses it
        sharpness = QUICK_GELU if config.activation_func is quick_gelu else 1.0
        self.glu = Glu(sharpness, config.activation_func_clamp_value, config.glu_linear_offset)
        shards: int = pg_collection.expt_tp.size()
        width = config.moe_ffn_hidden_size // shards
        on_default = config.use_cpu_initialization or config.init_model_with_meta_device
        parameters: list[tuple[str, tuple[int, ...], int, Any]] = [
            ("weight1", (num_local_experts, 2 * width, config.hidden_size), 1, config.init_method),
            ("weight2", (num_local_experts, config.hidden_size, width), 2, config.output_layer_init_method),
        ]
        if config.add_bias_linear:
            assert shards == 1, "Megatron-Core does not support biases with expert tensor parallelism"
            parameters += [
                ("bias1", (num_local_experts * 2 * width,), 0, torch.nn.init.zeros_),
                ("bias2", (num_local_experts * config.hidden_size,), 0, torch.nn.init.zeros_),
            ]
        for name, shape, split, initialise in parameters:
            empty = torch.empty(shape, dtype=config.params_dtype, device=None if on_default else "cuda")
            weight = torch.nn.Parameter(initialise(empty) if config.perform_initialization else empty)
            # allreduce False: Megatron reduces the gradient over the ranks that hold the same experts. The attributes
            # of tensor parallelism: every rank's part counts in the gradient's norm
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(weight, True, split, 1)
            self.register_parameter(name, weight)
        self.adapters = torch.nn.ModuleDict()  # of `megarl.actor.lora`, by the name of the weight

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens [n, hidden], sorted by expert, tokens_per_expert [local experts], probs [n] -> [n, hidden]."""
        ends = tokens_per_expert.to(tokens.device).cumsum(0, dtype=torch.int32)
        gate_up = self._product("weight1", tokens, ends)
        # biases are added as products with a one-hot matrix, whose gradients need no atomic additions
        chosen = one_hot_groups(ends, len(tokens)) if self.config.add_bias_linear else None
        if chosen is not None:
            gate_up = torch.addmm(gate_up, chosen.to(gate_up.dtype), self.bias1.view(len(ends), -1))
        output = self._product("weight2", weighted_glu(gate_up, probs, self.glu, self.backend), ends)
        if chosen is None:
            return output, None
        return torch.addmm(output, (chosen * probs[:, None]).to(output.dtype), self.bias2.view(len(ends), -1)), None

    def _product(self, name: str, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = grouped_linear(tokens, getattr(self, name), ends, self.backend)
        return product + self.adapters[name](tokens, ends) if name in self.adapters else product

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """One tensor on disk for each expert's gate, up and down projection."""
        assert metadata and metadata["singleton_local_shards"] and not sharded_offsets, "megarl saves this way"
        replica = (0, 0, self.groups.expt_dp.rank())
        kinds = ("weight", "bias") if self.config.add_bias_linear else ("weight",)
        state = {}
        for kind, (n, parts, split) in itertools.product(kinds, ((1, ("_w", "_v"), 0), (2, ("",), 1))):
            parameter = self.get_parameter(f"{kind}{n}")
            state[f"{prefix}{kind}{n}"] = ShardedTensorFactory(
                f"{prefix}experts.linear_fc{n}.{kind}",
                parameter,
                partial(self._shards, parts=parts, split=split if kind == "weight" else 0),
                partial(_merge, shape=parameter.shape),
                replica,
            )
        return state

    def _shards(
        self,
        key: str,
        weight: torch.Tensor,
        replica: tuple[int, ...],
        _: Any,
        parts: tuple[str, ...],
        split: int,
    ) -> list[ShardedTensor]:
        """Views of the parameter, in its order, one for each tensor on disk. ``key`` has the layer's number already."""
        before, after = key.rsplit("linear_fc", 1)
        weight = weight.detach().view(len(self.weight1), -1) if weight.ndim == 1 else weight.detach()
        first = self.groups.ep.rank() * len(weight)
        offset = (split, self.groups.expt_tp.rank(), self.groups.expt_tp.size())
        return [
            ShardedTensor.from_rank_offsets(
                f"{before}{first + local}.linear_fc{after}{part}", data, offset, replica_id=replica
            )
            for local, expert in enumerate(weight)
            for part, data in zip(parts, expert.chunk(len(parts)), strict=True)
        ]

    def backward_dw(self) -> None:
        """Part of Megatron's interface: weight gradients are never delayed here."""


def _merge(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    return torch.cat(parts).view(shape)


def one_hot_groups(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, groups] bool: whether ``ends[g - 1] <= row < ends[g]``; ``ends`` [groups] stays on the device."""
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    ended = row[:, None] >= ends
    return ended.logical_not() & F.pad(ended, (1, -1), value=True)


def grouped_linear(
    tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, backend: str = "torch"
) -> torch.Tensor:
    """tokens [n, in], weight [groups, out, in] -> [n, out]; rows ``ends[g - 1]`` to ``ends[g]`` belong to group g.

    ``ends`` [groups] int32 stays on the device. `grouped_mm` needs rows whose size is a multiple of 16 bytes: others
    are padded with zeros for the product, which costs a copy of the weight. backend: with "triton", gradients of others
    are added to the weight's `main_grad`, if it has one.
    """
    outputs, inputs = weight.shape[1:]
    if not len(tokens):
        return tokens @ weight[0].t()  # so that the weight gets a gradient (zeros) even without tokens
    unit = _ALIGNMENT // tokens.element_size()
    more_outputs, more_inputs = -outputs % unit, -inputs % unit
    if more_outputs or more_inputs:
        weight, tokens = F.pad(weight, (0, more_inputs, 0, more_outputs)), F.pad(tokens, (0, more_inputs))
    elif backend == "triton" and main_grad(weight) is not None:
        return _GroupedLinear.apply(tokens, weight, ends)
    transposed = weight.transpose(1, 2)
    if transposed.requires_grad and tokens.is_cuda and torch.cuda.get_device_capability() >= _UNWRITTEN_FROM:
        transposed.register_hook(partial(_zero_empty_groups, ends))
    products = F.grouped_mm(tokens, transposed, offs=ends)
    return products[:, :outputs] if more_outputs else products


class _GroupedLinear(torch.autograd.Function):
    """`grouped_linear` whose backward pass adds the weight's gradient to its `main_grad`."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight, ends)
        return F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tokens, weight, ends = ctx.saved_tensors
        total = main_grad(weight)
        assert total is not None
        add_group_products(total, gradient := gradient.contiguous(), tokens, ends)
        return F.grouped_mm(gradient, weight, offs=ends), added(weight), None


def _zero_empty_groups(ends: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The weight gradient, with zeros for groups without rows."""
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradient.masked_fill_(empty[:, None, None], 0)
