"""Which Hugging Face tensors a Megatron parameter is made of, as views of the parameter.

Covers the torch-native modules, Transformer Engine's (norm weights inside the linear layer that follows) and both
grouped-GEMM forms of the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.actor.model import PolicyModel

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class HfTensor:
    """This rank's slice of a Hugging Face tensor."""

    name: str  # of an expert's tensor with "{}" for the number of the expert
    views: tuple[torch.Tensor, ...]  # views of a Megatron parameter; one below another they are the slice
    split: int | None  # dimension that tensor parallelism splits; None: replicated
    parameter: str  # the Megatron parameter's name, for messages
    local_expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return (sum(view.shape[0] for view in self.views), *self.views[0].shape[1:])

    def blocks(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row in the slice, view of at most ``rows`` rows), which together are the slice."""
        first = 0
        for view in self.views:
            for block in view.split(rows):
                yield first, block
                first += block.shape[0]


# (Hugging Face name, dimension that tensor parallelism splits) of what is one tensor on both sides
_TOP = {
    "embedding.word_embeddings.weight": (EMBEDDING, 0),
    "output_layer.weight": (LM_HEAD, 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
}
_LAYER = {
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.router.weight": ("mlp.gate.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
}
_EXPERT = re.compile(
    r"mlp\.experts\.(?:"
    r"local_experts\.(?P<sequential>\d+)\.linear_fc(?P<sequential_fc>[12])\.weight"
    r"|linear_fc(?P<grouped_fc>[12])\.weight(?P<grouped>\d+)"  # TEGroupedMLP
    r"|weight(?P<stacked_fc>[12]))"  # GroupedMLP: all experts in one tensor, input dimension first
)


def hf_tensors(models: list[PolicyModel]) -> Iterator[HfTensor]:
    """All Hugging Face tensors of which this rank holds a slice, in the order of the model.

    Tied embeddings come as `LM_HEAD` too, on the last pipeline stage.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            yield from _of_parameter(name, parameter.detach(), model)
        if model.share_embeddings_and_output_weights and model.pre_process and model.post_process:
            weight = model.embedding.word_embeddings.weight.detach()
            yield HfTensor(LM_HEAD, (weight,), 0, "embedding.word_embeddings.weight")


def _of_parameter(name: str, parameter: torch.Tensor, model: PolicyModel) -> Iterator[HfTensor]:
    if name in _TOP:
        yield HfTensor(_TOP[name][0], (parameter,), _TOP[name][1], name)
        return
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.<local>.<rest>
    prefix = f"model.layers.{model.decoder.layers[int(layer)].layer_number - 1}."
    if rest in _LAYER:
        yield HfTensor(prefix + _LAYER[rest][0], (parameter,), _LAYER[rest][1], name)
    elif rest.startswith("self_attention.linear_qkv."):
        for letter, views in zip("qkv", _query_key_value(parameter, model.config), strict=True):
            yield HfTensor(f"{prefix}self_attn.{letter}_proj.{rest.rpartition('.')[2]}", views, 0, name)
    elif rest == "mlp.linear_fc1.weight":
        for kind, half in zip(("gate", "up"), parameter.chunk(2), strict=True):
            yield HfTensor(f"{prefix}mlp.{kind}_proj.weight", (half,), 0, name)
    else:
        yield from _of_experts(name, rest, prefix, parameter, model.config)


def _query_key_value(parameter: torch.Tensor, config: TransformerConfig) -> list[tuple[torch.Tensor, ...]]:
    """Megatron stores one query group after another: its queries, its key, its value."""
    queries = config.num_attention_heads // config.num_query_groups
    sizes = [queries * config.kv_channels, config.kv_channels, config.kv_channels]
    groups = [group.split(sizes) for group in parameter.split(sum(sizes))]
    return [tuple(group[i] for group in groups) for i in range(3)]


def _of_experts(
    name: str, rest: str, prefix: str, parameter: torch.Tensor, config: TransformerConfig
) -> Iterator[HfTensor]:
    match = _EXPERT.fullmatch(rest)
    if match is None:
        raise NotImplementedError(f"no Hugging Face tensor is known for Megatron's parameter {name}")
    if match["stacked_fc"]:
        count = config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
        inputs = config.hidden_size if match["stacked_fc"] == "1" else parameter.shape[0] // count
        experts = [(i, expert.t()) for i, expert in enumerate(parameter.view(count, inputs, -1))]
    else:
        experts = [(int(match["sequential"] or match["grouped"]), parameter)]
    first_layer = (match["sequential_fc"] or match["grouped_fc"] or match["stacked_fc"]) == "1"
    for number, weight in experts:
        kinds, views, split = (("gate", "up"), weight.chunk(2), 0) if first_layer else (("down",), (weight,), 1)
        for kind, view in zip(kinds, views, strict=True):
            yield HfTensor(f"{prefix}mlp.experts.{{}}.{kind}_proj.weight", (view,), split, name, number)


def expert_number(local: int, rank: int, config: TransformerConfig) -> int:
    """The model's number of an expert, from its number on expert-parallel rank ``rank``."""
    per_rank: int = config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
    return local + rank * per_rank


def all_names(config: TransformerConfig, tied: bool) -> set[str]:
    """Every tensor name of the whole model, one an expert."""
    layer = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo")]
    layer += ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_layernorm else []
    mlp = ["gate_proj", "up_proj", "down_proj"]
    if config.num_moe_experts:
        layer.append("mlp.gate")
        layer += [f"mlp.experts.{e}.{x}" for e in range(config.num_moe_experts) for x in mlp]
    else:
        layer += [f"mlp.{x}" for x in mlp]
    names = [f"{x}.weight" for x in layer]
    names += [f"self_attn.{x}_proj.bias" for x in "qkv"] if config.add_qkv_bias else []
    everywhere = {EMBEDDING, "model.norm.weight"} | (set() if tied else {LM_HEAD})
    return everywhere | {f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in names}
