"""DeepSeek-V3, R1 and Moonlight: latent attention; sigmoid routing within groups; the first layers are dense."""

from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp, MixtureOfExperts
from megarl.models.latent_attention import MultiHeadLatentAttention

FAMILY = Family(
    MultiHeadLatentAttention(),
    MixtureOfExperts(shared="mlp.shared_experts", sigmoid=True),
    dense=GatedMlp(),
    aliases={"num_experts": "n_routed_experts"},
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    # settings of published config.json files that transformers ignores
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)
