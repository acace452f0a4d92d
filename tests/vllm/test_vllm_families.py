"""vLLM makes of every family's export what transformers makes of it."""

import pytest

from megarl.rollout import build_engine
from megarl.rollout.drift import check_weights
from tests.actor.conftest import make_hf_model
from tests.rollout.engines import OWN_OPTION, reference_of, stage_recipe

pytestmark = pytest.mark.vllm
# heads of 32 are the smallest that vLLM serves on a CPU
SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.1}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {}),
        ("olmoe", {"rms_norm_eps": 1e-5}),  # vLLM 0.32 takes it for every OLMoE
        ("qwen2_moe", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {"head_dim": 8}),
    ],
)
def test_vllm_loads_an_export(tmp_path, family, settings):
    make_hf_model(family, **SIZES | settings).save_pretrained(tmp_path)
    recipe = stage_recipe("vllm", model={"path": str(tmp_path)}, rollout=OWN_OPTION)
    engine = build_engine(recipe, 0, tmp_path, 0, routed_experts=False)
    try:
        drift = check_weights(engine, reference_of(tmp_path))
    finally:
        engine.close()
    assert drift.tokens > 100 and drift.max < 1e-4
