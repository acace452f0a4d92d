"""Megatron layer specs of megarl's modules, for every model family.

With ``[actor] layers = "transformer_engine"`` the same layers multiply matrices with Transformer Engine: those of
softmax attention, of dense feed-forwards, and of routed and shared experts. Norms, attention and rotary embedding are
megarl's either way, so both kinds of layers compute the same function of the same parameters.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megarl.actor.attention import PackedAttention, RMSNorm
from megarl.actor.delta_net import GatedDeltaNet
from megarl.actor.dispatch import routed_experts
from megarl.actor.experts import GroupedExperts
from megarl.actor.latent_attention import LatentAttention


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm over all heads of a token (OLMoE): [T, 1, heads of this rank, head_dim] -> the same shape."""

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float) -> None:
        super().__init__()
        self.group, self.eps, self.whole = get_tensor_model_parallel_group(), eps, heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.whole // self.group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.float().flatten(-2)
        squares = flat.square().sum(-1, keepdim=True)
        if self.group.size() > 1:  # all-reduce forward, and backward too, since every rank's output depends on the sum
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = (flat * torch.rsqrt(squares / self.whole + self.eps)).to(x.dtype)
        return (normed * self.weight).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's contract; tensor parallelism divides the weight."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class AllHeadsNormAttention(SelfAttention):
    """Attention whose queries and keys are normalised over all heads of a token.

    The norms are set here because Megatron-Core 0.19.2 refuses a spec that has them (transformer/attention.py:1710)
    unless ``qk_layernorm`` is set, which means norms of single heads, whose gradients it sums over all ranks.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        width, eps = self.hidden_size_per_attention_head, config.layernorm_epsilon
        self.q_layernorm = AllHeadsRMSNorm(config, width, config.num_attention_heads, eps)
        self.k_layernorm = AllHeadsRMSNorm(config, width, config.num_query_groups, eps)


def block_spec(
    config: TransformerConfig, transformer_engine: bool, norms_all_heads: bool = False, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The block spec of a decoder.

    transformer_engine: whether Transformer Engine multiplies the matrices. norms_all_heads: queries and keys are
    normalised over all heads of a token; Megatron has no setting for this.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # layers share at most two: MoE and dense
        _use_own_modules(layer.submodules, config, norms_all_heads, transformer_engine)
    if config.linear_attention_freq:
        offset = get_transformer_layer_offset(config, vp_stage)
        of_stage = config.linear_attention_freq[offset : offset + len(block.layer_specs)]
        pairs = zip(block.layer_specs, of_stage, strict=True)
        block.layer_specs = [_with_delta_net(layer) if linear else layer for layer, linear in pairs]
    block.layer_norm = RMSNorm
    return block


def _with_delta_net(layer: ModuleSpec) -> ModuleSpec:
    return replace(layer, submodules=replace(layer.submodules, self_attention=ModuleSpec(module=GatedDeltaNet)))


def _use_own_modules(
    layer: TransformerLayerSubmodules, config: TransformerConfig, norms_all_heads: bool, transformer_engine: bool
) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    kind, arguments = _module(layer.mlp)
    if kind is MoELayer:
        submodules = arguments["submodules"]
        submodules.experts = _engine_experts() if transformer_engine else GroupedExperts
        layer.mlp = routed_experts(submodules)
        arguments = _module(submodules.shared_experts)[1]
    attention = layer.self_attention
    attention.submodules.core_attention = PackedAttention
    if config.multi_latent_attention:
        attention.module = LatentAttention
    elif norms_all_heads:
        attention.module = AllHeadsNormAttention
    elif config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    if transformer_engine:
        for parent in (attention.submodules, arguments["submodules"]):
            _use_engine_products(parent)


def _module(spec: Any) -> tuple[type, dict[str, Any]]:
    """The class that a spec builds, and the arguments that it fixes: the spec of a feed-forward is a ModuleSpec in
    Megatron-Core 0.16 and a partial in 0.19."""
    return (spec.module, vars(spec)) if isinstance(spec, ModuleSpec) else (spec.func, spec.keywords)


def _use_engine_products(submodules: Any) -> None:
    """Replace Megatron's linear layers by Transformer Engine's, which have the same parameters."""
    provider = TESpecProvider()
    of_engine = {
        ColumnParallelLinear: provider.column_parallel_linear(),
        RowParallelLinear: provider.row_parallel_linear(),
    }
    for name, value in vars(submodules).items():
        if value in of_engine:
            setattr(submodules, name, of_engine[value])


def _engine_experts() -> Any:
    """The spec of Megatron's experts on Transformer Engine's grouped products, as the installed version wants it."""
    modules: Any = TESpecProvider().grouped_mlp_modules
    if "moe_use_legacy_grouped_gemm" in signature(modules).parameters:  # Megatron-Core 0.16
        kind, submodules = modules(True, False)
        return ModuleSpec(module=kind, submodules=submodules)
    return modules(True)
