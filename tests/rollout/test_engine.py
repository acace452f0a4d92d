"""Parts that all engines share: seeds, sampling parameters, module interface, names in recipes, expert records."""

import inspect

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.recipe.load import parse_recipe
from megarl.recipe.names import ENGINES
from megarl.rollout import engine_module
from megarl.rollout.continuous import checked_experts
from megarl.rollout.engine import (
    MOST_DISCARDED,
    Completion,
    EngineFault,
    EngineModule,
    continuation_seed,
    discard,
    fault,
    next_seed,
    response_seed,
)


def test_response_seeds_are_stable_and_distinct():
    assert response_seed(0, 0, 0) == 332059178346324991
    assert response_seed(1234, 98304, 7) == 3908011611399697343
    seeds = {response_seed(run, group, k) for run in range(3) for group in range(1000) for k in range(8)}
    assert len(seeds) == 3 * 1000 * 8
    assert response_seed(1, 23, 4) != response_seed(12, 3, 4)  # the numbers are separated before they are hashed
    seeds |= {continuation_seed(seed, 1) for seed in seeds} | {next_seed(seed, 1) for seed in seeds}
    assert len(seeds) == 3 * 3 * 1000 * 8
    assert len({next_seed(5, discarded) for discarded in range(4)}) == 4 and next_seed(5, 0) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_module_has_the_functions_of_the_protocol(name):
    module = engine_module(name)
    assert {"cpu", "cuda"} >= module.RECORDS_EXPERTS
    for function in ("check", "build"):
        _, *expected = inspect.signature(getattr(EngineModule, function)).parameters.values()
        assert list(inspect.signature(getattr(module, function)).parameters.values()) == expected


def test_an_unknown_engine_is_refused_with_the_nearest_name():
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


def completion(logprobs, reason="stop", tokens=None):
    tokens = range(len(logprobs)) if tokens is None else tokens
    return Completion(0, 0, np.array(tokens, np.int32), np.array(logprobs, np.float32), reason, None, 0)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1e-3, 7.0, 3e38])
def test_a_log_prob_that_no_softmax_gives_is_a_fault(value, place):
    logprobs = [-0.5, -2.0, -1e-6]
    logprobs[place] = value
    assert "log-prob" in fault(completion(logprobs))
    assert "log-prob" in fault(completion(logprobs, "interrupted"))


def test_what_else_is_a_fault_of_an_engine_and_what_is_not():
    for reason in ("stop", "length", "timeout", "interrupted"):
        assert fault(completion([0.0, -1e-30, 5e-5, -3e38], reason)) is None
    assert fault(completion([], "interrupted")) is None
    assert fault(completion([])) == "0 tokens with 0 log-probs"
    assert fault(completion([-1.0], tokens=[3, 4])) == "2 tokens with 1 log-probs"
    assert fault(completion([-1.0, -2.0], tokens=[3])) == "1 tokens with 2 log-probs"
    assert fault(completion([-1.0], tokens=[-3])) == "token -3 is negative"
    for reason in ("abort", "unfinished", "", None):
        assert "finish reason" in fault(completion([-1.0], reason))


def test_an_attempt_too_many_is_an_engine_fault(capfd):
    discarded = 0
    for _ in range(MOST_DISCARDED):
        discarded = discard("it is odd", "response 2", discarded)
    with pytest.raises(EngineFault, match="response 2 wrongly 4 times, the last time because it is odd"):
        discard("it is odd", "response 2", discarded)
    assert not issubclass(EngineFault, UserError)
    assert capfd.readouterr().err.count("response 2 is generated again with another seed") == MOST_DISCARDED


HF = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 200, "sparse_layers": [0, 1, 2]}


def test_recorded_experts_that_no_router_returns_are_an_error():
    routed = np.argsort(np.random.default_rng(0).random((9, 3, 200)), axis=-1)[..., :2].astype(np.int32)
    experts = checked_experts(routed, 9, HF, cut_off=False)
    assert experts.dtype == np.int16 and (experts == routed).all()
    assert (checked_experts(routed, 8, HF, cut_off=False) == routed[:8]).all()
    part = checked_experts(routed[:5], 9, HF, cut_off=True)
    assert (part[:5] == routed[:5]).all() and (part[5:] == -1).all()
    assert (checked_experts(None, 9, HF, cut_off=True) == -1).all()
    first_dense, zeros = HF | {"sparse_layers": [1, 2]}, np.concatenate([0 * routed[:, :1], routed[:, 1:]], 1)
    with_dense = checked_experts(zeros, 9, first_dense, cut_off=False)
    assert (with_dense[:, 1:] == routed[:, 1:]).all() and (with_dense[:, 0] == -1).all()
    outside, twice, empty = routed.copy(), routed.copy(), np.zeros_like(routed)
    outside[8, 2, 1], twice[4, 1] = 200, 7
    for wrong, message in [(outside, "to 200; the model has 200"), (twice, "one expert twice"), (empty, "not filled")]:
        with pytest.raises(RuntimeError, match=message):
            checked_experts(wrong, 9, HF, cut_off=True)
    for wrong in (None, routed[:8], routed[:, :2]):
        with pytest.raises(RuntimeError, match=r"of the shape .*, not \(9, 3, 2\)"):
            checked_experts(wrong, 9, HF, cut_off=False)
    single = np.zeros((200, 3, 1), np.uint8)
    with pytest.raises(RuntimeError, match="same expert for all tokens"):
        checked_experts(single, 200, HF | {"num_experts_per_tok": 1}, cut_off=False)
