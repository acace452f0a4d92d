"""What preflight refuses of a machine."""

from contextlib import nullcontext

import pytest

from megarl.errors import UserError
from megarl.kernels import library
from megarl.workers.preflight import check_devices, check_layers
from tests.actor.conftest import make_recipe, read_settings


def test_torch_itself_needs_tritons_compiler_for_the_builtin_engine(monkeypatch):
    """Of torch 2.13: also with kernels = "torch"; an engine of another kind comes to the next check."""

    monkeypatch.setattr(library, "triton_lacks", lambda: "triton needs a C compiler when it runs")
    actor = {"backend": "cuda", "kernels": "torch"}
    with pytest.raises(UserError, match="torch runs a kernel of Triton for it on GPUs: triton needs a C compiler"):
        check_devices(make_recipe(actor=actor))
    with pytest.raises(UserError, match="needs 1 GPUs, but torch sees 0 here"):
        check_devices(make_recipe(actor=actor, rollout={"engine": "vllm"}))


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("deepseek_v3", True),
        ("olmoe", True),
        ("qwen3_next", True),
        ("qwen3_5_moe", True),
        ("gpt_oss", True),
        ("glm4_moe", False),
    ],
)
def test_attention_that_transformer_engine_was_never_compared_with_is_refused(tmp_path, family, refused):
    recipe = make_recipe(actor={"backend": "cuda", "layers": "transformer_engine"})
    hf = read_settings(tmp_path, family)
    check_layers(make_recipe(), hf)
    with pytest.raises(UserError, match=f'attention of {family}.*use "torch"') if refused else nullcontext():
        check_layers(recipe, hf)


def test_norms_of_heads_are_refused_where_the_norm_is_over_all_of_them(tmp_path):
    recipe = make_recipe(megatron={"qk_layernorm": True})
    check_layers(recipe, read_settings(tmp_path, "qwen3"))
    with pytest.raises(UserError, match="qk_layernorm: this model normalises queries and keys over all heads"):
        check_layers(recipe, read_settings(tmp_path, "olmoe"))
