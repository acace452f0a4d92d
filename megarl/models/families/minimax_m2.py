"""MiniMax-M2, 2.1 and 2.5: OLMoE's norms over all heads, a partly rotated head, sigmoid routing without groups."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import MixtureOfExperts

_FIXED = {"norm_topk_prob": True, "routed_scaling_factor": 1.0}  # settings of other families' config.json files

FAMILY = Family(
    GroupedQueryAttention(qk_norm="all heads", partial_rotary=True),
    MixtureOfExperts(
        sigmoid=True,
        grouped=False,
        module="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
        bias="e_score_correction_bias",
    ),
    aliases={"moe_intermediate_size": "intermediate_size", "num_nextn_predict_layers": "num_mtp_modules"},
    defaults=_FIXED | {"rope_theta": 5e6},
    only=_FIXED
    | {
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
)
