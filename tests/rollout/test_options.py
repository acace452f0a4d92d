"""An engine gets the settings of the recipe; its own parser checks its own options."""

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
    """Of a run on GPUs whose second stage has settings of its own."""
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


OPTIONS = {  # of each engine: some that are taken, and some that megarl sets itself
    "vllm": (
        {"quantization": "fp8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"tensor_parallel_size": 2},
    ),
    "sglang": (
        {"quantization": "fp8", "speculative-algorithm": "NGRAM", "enable_deterministic_inference": True},
        # who may connect, and SGLang's other name of tensor-parallel-size
        {"api_key": "0.0.0.0", "host": "0.0.0.0", "tp_size": 2},
    ),
}


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in OPTIONS], ids=str)
def test_options_are_checked_by_the_engines_own_parser(engine, models):
    path, (good, own) = models["qwen3"][0], OPTIONS[engine]

    def check(options, backend="cpu"):
        tables = {"model": {"path": str(path)}, "actor": {"backend": backend, "kernels": "torch"}}
        check_engine(stage_recipe(engine, **tables, rollout={engine: options}), 0, read_hf_config(path))

    check(good, "cuda")
    for options, said in (
        (own, f" {', '.join(own)}: remove this here, megarl sets it itself"),
        ({"kv_cache_dtype": "fp7"}, ": .*parser refuses --kv-cache-dtype fp7: .*invalid"),
        ({"quantisation": "fp8"}, ": .*parser refuses --quantisation fp8: .*quantisation"),
    ):
        with pytest.raises(UserError, match=rf"\[rollout.{engine}\]{said}"):
            check(options)


@pytest.mark.vllm
def test_layers_that_need_a_gpu_are_refused_on_a_cpu(tmp_path):
    hf, tables = read_settings(tmp_path, "qwen3_next", head_dim=32), {"model": {"path": str(tmp_path)}}
    check_engine(stage_recipe("vllm", **tables, actor={"backend": "cuda", "kernels": "torch"}), 0, hf)
    with pytest.raises(UserError, match="engine = 'vllm' on a CPU computes gated delta nets in bfloat16 only"):
        check_engine(stage_recipe("vllm", **tables), 0, hf)
