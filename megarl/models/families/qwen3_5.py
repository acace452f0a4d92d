"""Qwen3.5 and 3.6, dense: the layers of Qwen3.5 MoE without experts, in a model that also sees images."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.delta_net import SIZES, GatedDeltaNet
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp

FAMILY = Family(
    GroupedQueryAttention(qk_norm="head", partial_rotary=True, output_gate=True),
    GatedMlp(),
    linear=GatedDeltaNet(separate=True),
    defaults=SIZES | {"full_attention_interval": 4, "partial_rotary_factor": 0.25},
    zero_centred_norms=True,
    copied=("mtp.", "model.visual."),
    prefix="model.language_model.",
    nested="text_config",
)
