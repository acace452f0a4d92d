"""Qwen3.5 MoE: Qwen3-Next's layers in a model that also sees images; its vision tower is copied into every export."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.delta_net import SIZES, GatedDeltaNet
from megarl.models.family import Family
from megarl.models.feed_forward import MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(qk_norm="head", partial_rotary=True, output_gate=True),
    MixtureOfExperts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"),
    linear=GatedDeltaNet(separate=True),
    aliases={"intermediate_size": "moe_intermediate_size"},  # Megatron requires it, though no layer uses it
    defaults=SIZES | {"full_attention_interval": 4, "norm_topk_prob": True, "partial_rotary_factor": 0.25},
    only={"norm_topk_prob": True},
    zero_centred_norms=True,
    copied=("mtp.", "model.visual."),
    prefix="model.language_model.",
    nested="text_config",
)
