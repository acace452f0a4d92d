"""Qwen3-Next: three of four layers are gated delta nets, attention has an output gate, and norms are zero-centred."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.delta_net import SIZES, GatedDeltaNet
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp, MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(qk_norm="head", partial_rotary=True, output_gate=True),
    MixtureOfExperts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"),
    dense=GatedMlp(),
    linear=GatedDeltaNet(),
    defaults=SIZES | {"full_attention_interval": 4, "norm_topk_prob": True, "partial_rotary_factor": 0.25},
    zero_centred_norms=True,
    copied=("mtp.",),  # the published models' layers for multi-token prediction, which transformers ignores
)
