"""SGLang and transformers compute the same log-probs for a model of another family."""

import pytest

from megarl.rollout import build_engine
from megarl.rollout.drift import measure_drift
from tests.actor.conftest import make_hf_model
from tests.rollout.engines import OWN_OPTION, reference_of, stage_recipe

pytestmark = pytest.mark.sglang
SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.1}


@pytest.mark.parametrize("family", ["mixtral"])
def test_sglang_computes_the_log_probs_of_transformers(tmp_path, family):
    make_hf_model(family, **SIZES).save_pretrained(tmp_path)
    recipe = stage_recipe("sglang", model={"path": str(tmp_path)}, rollout=OWN_OPTION)
    engine = build_engine(recipe, 0, tmp_path, 0, routed_experts=False)
    try:
        drift = measure_drift(engine, reference_of(tmp_path))
    finally:
        engine.close()
    assert drift.tokens > 100 and drift.max < 1e-4
