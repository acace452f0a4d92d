"""What all engines share: seeds, sampling settings, the functions of their modules, the names in recipes."""

import inspect

import pytest

from megarl.errors import UserError
from megarl.recipe.load import parse_recipe
from megarl.recipe.names import ENGINES
from megarl.rollout import engine_module
from megarl.rollout.engine import EngineModule, Sampling, continuation_seed, response_seed


def test_response_seeds_are_stable_and_distinct():
    assert response_seed(0, 0, 0) == 332059178346324991
    assert response_seed(1234, 98304, 7) == 3908011611399697343
    seeds = {response_seed(run, group, k) for run in range(3) for group in range(1000) for k in range(8)}
    assert len(seeds) == 3 * 1000 * 8
    assert response_seed(1, 23, 4) != response_seed(12, 3, 4)  # the parts are not run together
    seeds |= {continuation_seed(seed, 1) for seed in seeds}
    assert len(seeds) == 2 * 3 * 1000 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"temperature": float("nan")}, {"max_tokens": 0}, {"samples": 0}]
)
def test_sampling_refuses_what_means_nothing(change):
    good = {"temperature": 1.0, "max_tokens": 4, "samples": 1, "stop_token_ids": (), "seeds": (1,)}
    Sampling(**good)
    with pytest.raises(UserError, match=f"{next(iter(change))} is .* must be above 0"):
        Sampling(**(good | change))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_module_offers_what_megarl_asks_of_it(name):
    module = engine_module(name)
    assert isinstance(module.RECORDS_EXPERTS, bool)
    for function in ("check", "build"):
        _, *expected = inspect.signature(getattr(EngineModule, function)).parameters.values()
        assert list(inspect.signature(getattr(module, function)).parameters.values()) == expected


def test_an_unknown_engine_is_named_with_the_nearest():
    tables = {
        "model": {"path": "unused"},
        "data": {"source": "reasoning_gym", "train": "spell_backward"},
        "reward": {"kind": "reasoning_gym"},
    }
    with pytest.raises(
        UserError, match=r"rollout.engine: unknown; did you mean 'sglang'\? known are 'builtin', 'vllm'"
    ):
        parse_recipe(tables | {"rollout": {"engine": "sglan"}})
    with pytest.raises(UserError, match=r"stages.0.engine: unknown; known are 'builtin', 'vllm', 'sglang' \(got 'q'\)"):
        parse_recipe(tables | {"stages": {"0": {"engine": "q"}}})
