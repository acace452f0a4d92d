"""vLLM and SGLang compute the log-probs of transformers for models of several families."""

import pytest

from megarl.rollout import build_engine
from megarl.rollout.drift import measure_drift
from tests.actor.conftest import FAMILIES, make_hf_model
from tests.rollout.engines import OWN_OPTION, reference_of, stage_recipe

# heads of 32 are the smallest that vLLM serves on a CPU
SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.1}

DEEPSEEK = {
    # config.json of the published models has these two; without them vLLM leaves out the router's bias
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # widths that vLLM's latent attention supports
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

# without YaRN vLLM's CPU kernel would rotate wrongly; only vLLM needs the number of dense layers
FLASH = DEEPSEEK | {"rope_parameters": FAMILIES["deepseek_v3"]["rope_parameters"], "first_k_dense_replace": 1}

# what vLLM 0.32 assumes of every gpt-oss, and a width that its CPU kernel supports
GPT_OSS = {"rms_norm_eps": 1e-5, "swiglu_limit": 7.0, "intermediate_size": 64}


CASES = (
    ("vllm", "mixtral", {}),
    ("vllm", "olmoe", {"rms_norm_eps": 1e-5}),  # vLLM 0.32 assumes it of every OLMoE
    ("vllm", "qwen2_moe", {}),
    ("vllm", "glm4_moe", {}),
    ("vllm", "deepseek_v3", DEEPSEEK),
    ("vllm", "glm4_moe_lite", FLASH),
    ("vllm", "gpt_oss", GPT_OSS),
    ("sglang", "mixtral", {}),
)


@pytest.mark.parametrize(
    ("name", "family", "settings"), [pytest.param(*case, marks=getattr(pytest.mark, case[0])) for case in CASES]
)
def test_an_engine_computes_the_log_probs_of_transformers(tmp_path, name, family, settings):
    make_hf_model(family, **SIZES | settings).save_pretrained(tmp_path)
    recipe = stage_recipe(name, model={"path": str(tmp_path)}, rollout=OWN_OPTION)
    engine = build_engine(recipe, 0, tmp_path, 0, routed_experts=False)
    try:
        drift = measure_drift(engine, reference_of(tmp_path))
    finally:
        engine.close()
    assert drift.tokens > 100 and drift.max < 1e-4
