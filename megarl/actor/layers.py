"""Megatron layer specs: of plain torch modules, for every model family, and of Transformer Engine's modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
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


def torch_block_spec(
    config: TransformerConfig, norms_all_heads: bool = False, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The block spec of a decoder made of plain torch modules.

    norms_all_heads: queries and keys are normalised over all heads of a token; Megatron has no setting for this.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # layers share at most two: MoE and dense
        _use_torch_modules(layer, config, norms_all_heads)
    if config.linear_attention_freq:
        offset = get_transformer_layer_offset(config, vp_stage)
        of_stage = config.linear_attention_freq[offset : offset + len(block.layer_specs)]
        pairs = zip(block.layer_specs, of_stage, strict=True)
        block.layer_specs = [_with_delta_net(layer) if linear else layer for layer, linear in pairs]
    block.layer_norm = RMSNorm
    return block


def _with_delta_net(layer: ModuleSpec) -> ModuleSpec:
    return replace(layer, submodules=replace(layer.submodules, self_attention=ModuleSpec(module=GatedDeltaNet)))


def _use_torch_modules(layer: ModuleSpec, config: TransformerConfig, norms_all_heads: bool) -> None:
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    mlp = layer.submodules.mlp  # a ModuleSpec in Megatron-Core 0.16, a partial in 0.19
    kind, arguments = (mlp.module, vars(mlp)) if isinstance(mlp, ModuleSpec) else (mlp.func, mlp.keywords)
    if kind is MoELayer:
        submodules = arguments["submodules"]
        submodules.experts = GroupedExperts
        layer.submodules.mlp = routed_experts(submodules)
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = PackedAttention
    if config.multi_latent_attention:
        attention.module = LatentAttention
    elif norms_all_heads:
        for name, heads in (("q_layernorm", config.num_attention_heads), ("k_layernorm", config.num_query_groups)):
            setattr(attention.submodules, name, ModuleSpec(module=AllHeadsRMSNorm, params={"heads": heads}))
    elif config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm


def engine_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The block spec of Transformer Engine's layers: its attention over packed sequences, grouped GEMM and fp8."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in block.layer_specs if config.num_moe_experts else ():
        # the torch modules' name in checkpoints, so that a checkpoint of either kind loads into the other
        layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return block
