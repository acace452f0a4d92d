"""GLM-4.7-Flash: latent attention and sigmoid routing as in DeepSeek-V3; by default only the first layer is dense."""

from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp, MixtureOfExperts
from megarl.models.latent_attention import MultiHeadLatentAttention

FAMILY = Family(
    MultiHeadLatentAttention(),
    MixtureOfExperts(shared="mlp.shared_experts", sigmoid=True),
    dense=GatedMlp(),
    aliases={"num_experts": "n_routed_experts", "feed_forwards": "mlp_layer_types"},
    defaults={
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
    },
    # settings of published config.json files that transformers ignores
    only={"first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)
