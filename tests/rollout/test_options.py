"""Settings of an engine's own are checked by its own argument parser before a process starts."""

import pytest

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.rollout import check_engine
from megarl.rollout.options import as_arguments
from tests.rollout.engines import stage_recipe


def test_options_become_arguments():
    options = {"max_num_seqs": 8, "enforce_eager": True, "enable-x": False, "spec": {"a": "b"}, "sizes": [1, 2]}
    expected = ["--max-num-seqs", "8", "--enforce-eager", "--no-enable-x", "--spec"] + ['{"a": "b"}']
    assert as_arguments(options) == [*expected, "--sizes", "1", "2"]


ENGINES = {
    "vllm": {
        "good": {"quantization": "fp8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "alias": {"tensor_parallel_size": 2},
        "closed": [],
        "value": {"kv_cache_dtype": "fp7"},
    },
    "sglang": {
        "good": {"quantization": "fp8", "speculative-algorithm": "NGRAM", "enable_deterministic_inference": True},
        "alias": {"tp_size": 2},  # another name of what megarl calls tensor-parallel-size
        "closed": ["host", "api_key"],
        "value": {"kv_cache_dtype": "fp7"},
    },
}


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES], ids=str)
def test_the_engines_own_parser_decides(engine, models):
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
    with pytest.raises(UserError, match=rf"\[rollout.{engine}\] (tp|tensor_parallel)_size: megarl sets this itself"):
        check(cases["alias"])
    for name in cases["closed"]:  # who may connect is not the recipe's business
        with pytest.raises(UserError, match=rf"\[rollout.{engine}\] {name}: megarl sets this itself"):
            check({name: "0.0.0.0"})
    with pytest.raises(UserError, match=rf"\[rollout.{engine}\]: .*parser refuses --kv-cache-dtype fp7: .*invalid"):
        check(cases["value"])
    with pytest.raises(UserError, match=rf"\[rollout.{engine}\]: .*parser refuses --quantisation fp8: .*quantisation"):
        check({"quantisation": "fp8"})
