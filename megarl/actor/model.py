"""Builds the policy from config.json and the recipe: a Megatron-Core GPTModel that returns log-probs and entropies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel import layers as megatron_linear
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.actor.attention import PackedAttention, PackedSequences, RMSNorm, rotary_tables
from megarl.actor.delta_rule import sequence_chunks
from megarl.actor.dispatch import RoutedExperts
from megarl.actor.layers import block_spec
from megarl.kernels.linear_logprob import linear_logprob
from megarl.kernels.short_attention import LONGEST
from megarl.kernels.weight_gradient import add_product
from megarl.models import family_of
from megarl.recipe.actor_table import Recompute
from megarl.recipe.megatron import shares_prompts
from megarl.recipe.tables import Recipe

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron-Core 0.16.1 defines this name only with Transformer Engine, but its routers always compare it with None
    moe_utils.te_general_gemm = None
if not hasattr(megatron_random, "FP8GlobalStateManager"):
    # likewise undefined without Transformer Engine, but used whenever norms are recomputed
    megatron_random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    megatron_random.activation_recompute_forward = megatron_random.fp8_autocast = lambda **_: nullcontext()


def _add_weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    add_product(total, gradient.t(), inputs)


# what Megatron has of Apex for `gradient_accumulation_fusion`
megatron_linear.fused_weight_gradient_mlp_cuda = SimpleNamespace(
    wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
)
megatron_linear._grad_accum_fusion_available = True


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Put a recomputed activation into the storage from which it was dropped, as Megatron-Core 0.16 does."""
    output.untyped_storage().resize_(recomputed.untyped_storage().size())
    output.untyped_storage().copy_(recomputed.untyped_storage())


# 0.19 would compile a C++ extension for this in the first backward pass that recomputes norms, which takes most of a
# minute and needs a compiler and Ninja (tensor_parallel/random.py:69)
megatron_random._share_storage_ext = SimpleNamespace(share_storage=_share_storage)

_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}


def transformer_config(hf: dict[str, Any], recipe: Recipe) -> TransformerConfig:
    """Megatron's configuration of the model. Fields in ``[megatron]`` override what megarl would set."""
    actor = recipe.actor
    cpu, transformer_engine = actor.backend == "cpu", actor.layers == "transformer_engine"
    dtype = torch.float32 if cpu else torch.bfloat16
    settings = family_of(hf).megatron_settings(hf)
    settings |= dict(
        activation_func=_ACTIVATIONS[settings.get("activation_func", "silu")],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=not cpu,
        tensor_model_parallel_size=actor.tensor_parallel,
        pipeline_model_parallel_size=actor.pipeline_parallel,
        context_parallel_size=actor.context_parallel,
        expert_model_parallel_size=actor.expert_parallel,
        expert_tensor_parallel_size=actor.expert_tensor_parallel or actor.tensor_parallel,
        sequence_parallel=actor.tensor_parallel > 1,
        # packed micro-batches differ in length. With virtual stages Megatron would confuse the shapes that two pipeline
        # ranks send each other, so `micro_batches` makes all of an update equally long there
        variable_seq_lengths=recipe.virtual_pipeline_stages is None,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even for dense models
        calculate_per_token_loss=True,  # sums of losses, divided once by the count of the whole optimizer batch
        batch_p2p_comm=False,  # with the default, virtual stages silently receive each other's messages
        use_cpu_initialization=cpu,
        # without it Megatron's dispatcher, which Transformer Engine's experts need for their counts on the host, waits
        # for the device several times a layer
        moe_permute_fusion=transformer_engine,
        bias_activation_fusion=transformer_engine,
        # the other fused variants need Apex
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=not cpu,
        persist_layer_norm=False,
        deterministic_mode=False,
    )
    if "num_moe_experts" in settings:
        settings |= dict(
            moe_router_dtype=None if cpu else "fp32",
            # load balancing would change the policy's log-probs, and ratios would show that as staleness
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
        )
    settings |= Recompute.of(actor.recompute, recipe.megatron).megatron_settings()
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    return kind(**settings | recipe.megatron)


class LogprobHead(ColumnParallelLinear):
    """The LM head, which can compute log-probs in the place of logits.

    That is a call of this module because Megatron's DDP gathers updated weights during the forward pass
    (``overlap_param_gather``) and waits for those of a module just before its call: a weight that is read without one
    may still be the old one.
    """

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        logprobs_of: Callable[[torch.Tensor, torch.Tensor], Any] | None = None,
    ) -> Any:
        """``logprobs_of(hidden, weight)``; without it ColumnParallelLinear.forward, whose output are logits."""
        if logprobs_of is None:
            return super().forward(hidden, weight, runtime_gather_output)
        return logprobs_of(hidden, self.weight if weight is None else weight)


class PolicyModel(GPTModel):
    """GPTModel whose last pipeline stage returns log-probs and entropies of the trained labels instead of logits.

    With ``labels`` [1, T] and ``PackedSequences.trained`` [N] that stage returns two tensors [N] float32: the log-probs
    of the labels under the distribution at ``temperature``, and the entropies of this distribution (nats). No rank ever
    holds full logits.
    """

    temperature: float = 1.0
    head_backend: str = "torch"  # backend of `megarl.kernels.linear_logprob`
    hf: dict[str, Any]  # the model's settings, from `megarl.models.hf_config.read_hf_config`
    shares_prompts: bool = False  # `megarl.recipe.megatron.shares_prompts`, for `megarl.actor.packing`
    adapters: dict[str, Any]  # `megarl.actor.lora.Adapter`s by the name of the parameter that each is added to

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer.__class__ = LogprobHead  # GPTModel builds it, and has no setting for its class

    @property
    def true_vocab_size(self) -> int:
        """Size of the vocabulary; further rows of embedding and LM head are padding for tensor parallelism."""
        return int(self.hf["vocab_size"])

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> Any:
        """GPTModel.forward, with what the layers share added to ``packed_seq_params``: rotary tables, and for gated
        delta nets the chunks of the sequences. Both are computed once for all layers."""
        if packed_seq_params is not None:
            frequencies, scale = self._frequencies()
            tables = rotary_tables(position_ids, frequencies, self.config.params_dtype, scale)
            packed_seq_params = replace(packed_seq_params, rotary=tables)
            if self.config.linear_attention_freq:
                chunks = sequence_chunks(packed_seq_params.length_runs, packed_seq_params.shard, position_ids.device)
                packed_seq_params = replace(packed_seq_params, chunks=chunks)
        return super().forward(
            input_ids, position_ids, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
        )

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [rotated dimensions / 2] and the scale of `rotary_tables`.

        Latent attention has them in every layer, all alike, so the first layer's are taken. Those of YaRN (Peng et al.
        2023, arXiv 2309.00071) are the embedding's angles at position 1.
        """
        owner = self.decoder.layers[0].self_attention if self.config.multi_latent_attention else self
        embedding = owner.rotary_pos_emb
        if not isinstance(embedding, YarnRotaryEmbedding):
            return embedding.inv_freq, 1.0
        angles, scale = embedding.get_emb(1, offset=1)
        return angles[0, 0, 0, : angles.shape[-1] // 2], scale

    def _postprocess(
        self,
        *,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if not self.post_process or labels is None:
            return super()._postprocess(
                hidden_states=hidden_states, labels=labels, packed_seq_params=packed_seq_params, **kwargs
            )
        assert isinstance(packed_seq_params, PackedSequences) and packed_seq_params.trained is not None
        tp_group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=tp_group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=tp_group)
        trained = packed_seq_params.trained
        logprobs_of = partial(
            linear_logprob,
            targets=labels[0].index_select(0, trained),
            temperature=self.temperature,
            group=tp_group if tp_group.size() > 1 else None,
            vocab_size=self.true_vocab_size,
            backend=self.head_backend,
        )
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden[:, 0].index_select(0, trained), tied, logprobs_of=logprobs_of)


def _yarn_embedding(hf: dict[str, Any], config: TransformerConfig) -> YarnRotaryEmbedding:
    """YaRN with config.json's settings; Megatron-Core 0.16.1's TransformerConfig has no fields for some of them."""
    yarn = hf["rope_yarn"]
    return YarnRotaryEmbedding(
        config.kv_channels,
        rotary_base=hf["rope_theta"],
        scaling_factor=yarn["factor"],
        original_max_position_embeddings=yarn["original_max_position_embeddings"],
        beta_fast=yarn.get("beta_fast") or 32,
        beta_slow=yarn.get("beta_slow") or 1,
        mscale=yarn.get("mscale") or None,
        mscale_all_dim=yarn.get("mscale_all_dim") or None,
        correction_range_round_to_int=yarn.get("truncate", True),
        use_cpu_initialization=config.use_cpu_initialization,
    )


def build_model(hf: dict[str, Any], recipe: Recipe) -> list[PolicyModel]:
    """This rank's model chunks (one, or one for each virtual pipeline stage); their weights are not loaded yet."""
    config = transformer_config(hf, recipe)
    tp, longest = recipe.actor.tensor_parallel, recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    virtual, norms_all_heads = config.virtual_pipeline_model_parallel_size, family_of(hf).attention.norms_all_heads
    chunks = []
    for stage in range(virtual) if virtual else (None,):
        model = PolicyModel(
            config,
            block_spec(config, recipe.actor.layers == "transformer_engine", norms_all_heads, stage),
            vocab_size=-(-hf["vocab_size"] // tp) * tp,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
            position_embedding_type="rope",
            rotary_percent=hf["rotary_fraction"],
            rotary_base=hf["rope_theta"],
            rope_scaling=hf["rope_scaling_factor"] is not None,
            rope_scaling_factor=hf["rope_scaling_factor"] or 1.0,
            vp_stage=stage,
        )
        model.position_embedding_type = "none"  # Megatron would compute tables of its own
        if hf.get("rope_yarn") and not config.multi_latent_attention:
            model.rotary_pos_emb = _yarn_embedding(hf, config)
        model.temperature = recipe.rollout.temperature
        model.head_backend = recipe.actor.head_backend
        # Transformer Engine's attention has no gathered keys
        model.shares_prompts = recipe.actor.layers == "torch" and shares_prompts(
            family_of(hf).megatron_settings(hf) | recipe.megatron
        )
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.experts.backend = module.token_dispatcher.backend = recipe.actor.head_backend
            elif isinstance(module, RMSNorm) or (isinstance(module, PackedAttention) and longest <= LONGEST):
                module.backend = recipe.actor.kernel_backend
        model.hf, model.adapters = hf, {}
        in_place = recipe.actor.backend == "cpu" or config.init_model_with_meta_device
        chunks.append(model if in_place else model.cuda())
    return chunks
