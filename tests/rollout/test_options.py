"""An engine gets the settings of the recipe; its own options are checked by its own argument parser before a start."""

import itertools

import pytest

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.rollout import check_engine
from megarl.rollout.continuous import Settings
from megarl.rollout.options import as_arguments
from megarl.rollout.sglang.engine import server_arguments
from megarl.rollout.vllm import engine_arguments
from tests.actor.conftest import read_settings
from tests.rollout.engines import CONTEXT, OWN_OPTION, TOGETHER, on, stage_recipe, started


def test_options_become_arguments():
    options = {"max_num_seqs": 8, "enforce_eager": True, "enable-x": False, "spec": {"a": "b"}, "sizes": [1, 2]}
    expected = ["--max-num-seqs", "8", "--enforce-eager", "--no-enable-x", "--spec"] + ['{"a": "b"}']
    assert as_arguments(options) == [*expected, "--sizes", "1", "2"]


def test_engines_are_started_with_the_settings_of_the_recipe(tmp_path):
    """Checks a run on GPUs whose second stage has settings of its own, as arguments of vLLM and of SGLang's server."""
    gpu = {"model": {"path": "unused"}, "actor": {"backend": "cuda"}}
    rollout = {"memory_fraction": 0.7, "tensor_parallel": 4, "float32_head": False}
    recipe = stage_recipe("vllm", **gpu, rollout=rollout, stages={"1": {"memory_fraction": 0.5, "tensor_parallel": 2}})
    found = engine_arguments(tmp_path, Settings.of(recipe, 1))
    same = {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2, "hf_overrides": {"head_dtype": "model"}}
    assert found.items() >= (same | {"max_model_len": CONTEXT, "max_num_seqs": TOGETHER}).items()
    plain = engine_arguments(tmp_path, Settings.of(stage_recipe("vllm", **gpu), 0))
    assert plain["hf_overrides"] == {"head_dtype": "float32"} and "gpu_memory_utilization" not in plain
    arguments = server_arguments(tmp_path, 0, Settings.of(recipe, 1))
    values = dict(itertools.pairwise(arguments))
    assert (values["--mem-fraction-static"], values["--tensor-parallel-size"]) == ("0.5", "2")
    assert int(values["--context-length"]) > CONTEXT and values["--max-running-requests"] == str(TOGETHER)
    assert "--enable-fp32-lm-head" not in arguments
    assert "--enable-fp32-lm-head" in server_arguments(tmp_path, 0, Settings.of(stage_recipe("sglang", **gpu), 0))


@on(started("qwen3_moe", "vllm", "sglang"))
def test_an_option_of_the_recipe_reaches_the_running_engine(engine, name):
    """The fixture `engine` starts it with `OWN_OPTION`."""
    (option, value), *_ = OWN_OPTION[name].items()
    if name == "vllm":
        assert getattr(engine._engine.model_config, option) == value
    else:
        assert engine._server.get("/server_info")[option] == value


ENGINES = {
    "vllm": {
        "good": {"quantization": "fp8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "set by megarl": {"tensor_parallel_size": 2},
        "named": "tensor_parallel_size",
        "value": {"kv_cache_dtype": "fp7"},
    },
    "sglang": {
        "good": {"quantization": "fp8", "speculative-algorithm": "NGRAM", "enable_deterministic_inference": True},
        # SGLang's other name of tensor-parallel-size, and who may connect
        "set by megarl": {"tp_size": 2, "host": "0.0.0.0", "api_key": "0.0.0.0"},
        "named": "api_key, host, tp_size",
        "value": {"kv_cache_dtype": "fp7"},
    },
}


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES], ids=str)
def test_options_are_checked_by_the_engines_own_parser(engine, models):
    hf = read_hf_config(models["qwen3"][0])

    def check(options, backend="cpu"):
        recipe = stage_recipe(
            engine,
            model={"path": str(models["qwen3"][0])},
            rollout={engine: options},
            actor={"backend": backend, "kernels": "torch"},
        )
        check_engine(recipe, 0, hf)

    cases = ENGINES[engine]
    check(cases["good"], "cuda")
    with pytest.raises(
        UserError, match=rf"\[rollout.{engine}\] {cases['named']}: remove this here, megarl sets it itself"
    ):
        check(cases["set by megarl"])
    with pytest.raises(UserError, match=rf"\[rollout.{engine}\]: .*parser refuses --kv-cache-dtype fp7: .*invalid"):
        check(cases["value"])
    with pytest.raises(UserError, match=rf"\[rollout.{engine}\]: .*parser refuses --quantisation fp8: .*quantisation"):
        check({"quantisation": "fp8"})


@pytest.mark.vllm
def test_gated_delta_nets_are_refused_for_vllm_on_a_cpu(tmp_path):
    hf = read_settings(tmp_path, "qwen3_next", head_dim=32)
    recipe = stage_recipe("vllm", model={"path": str(tmp_path)})
    with pytest.raises(UserError, match="engine = 'vllm' on a CPU computes gated delta nets in bfloat16 only"):
        check_engine(recipe, 0, hf)


@pytest.mark.vllm
def test_latent_attention_without_yarn_is_refused_for_vllm_on_a_cpu(tmp_path):
    """With YaRN `test_families` compares its log-probs; without, they would be off by more than a nat."""
    hf = read_settings(tmp_path, "glm4_moe_lite", qk_rope_head_dim=32, head_dim=32)
    recipe = stage_recipe("vllm", model={"path": str(tmp_path)})
    with pytest.raises(UserError, match="engine = 'vllm' on a CPU computes latent attention wrongly unless rope_type"):
        check_engine(recipe, 0, hf)


@pytest.mark.vllm
def test_sigmoid_routing_without_groups_is_refused_for_vllm_on_a_cpu(tmp_path):
    hf = read_settings(tmp_path, "minimax_m2", head_dim=32)
    recipe = stage_recipe("vllm", model={"path": str(tmp_path)})
    with pytest.raises(UserError, match="engine = 'vllm' on a CPU has no sigmoid routing without groups"):
        check_engine(recipe, 0, hf)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt_oss", "attention with sinks"),
        ("qwen2_moe", "shared experts with a gate"),
        ("qwen3_5", "gated delta nets"),
    ],
)
def test_layers_that_sglang_computes_only_on_gpus_are_refused_on_a_cpu(tmp_path, family, words):
    hf = read_settings(tmp_path, family)
    tables = {"model": {"path": str(tmp_path)}}
    check_engine(stage_recipe("sglang", **tables, actor={"backend": "cuda", "kernels": "torch"}), 0, hf)
    with pytest.raises(UserError, match=f"engine = 'sglang' on a CPU cannot compute {words}; use 'builtin'"):
        check_engine(stage_recipe("sglang", **tables), 0, hf)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-05, but config.json has 1e-06"),
        ({"swiglu_limit": 10.0}, "swiglu_limit = 7.0, but config.json has 10.0"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types alternating, beginning with sliding_attention"),
        ({"intermediate_size": 48}, "is a multiple of 32, but config.json has 48; use 'builtin'"),
    ],
)
def test_gpt_oss_models_that_vllm_would_compute_wrongly_are_refused(tmp_path, changes, words):
    published = {"rms_norm_eps": 1e-5, "swiglu_limit": 7.0, "intermediate_size": 64, "head_dim": 32}
    recipe = stage_recipe("vllm", model={"path": str(tmp_path)})
    check_engine(recipe, 0, read_settings(tmp_path, "gpt_oss", **published))
    with pytest.raises(UserError, match=words):
        check_engine(recipe, 0, read_settings(tmp_path, "gpt_oss", **published | changes))
