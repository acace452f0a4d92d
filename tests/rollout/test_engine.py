"""Parts that all engines share: seeds, sampling parameters, module interface, names in recipes, expert records."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.rollout import engine as common
from megarl.rollout import vllm
from megarl.rollout.continuous import Running, Settings, checked_experts
from megarl.rollout.engine import (
    MOST_DISCARDED,
    Completion,
    EngineFault,
    continuation_seed,
    discard,
    fault,
    next_seed,
    response_seed,
)
from megarl.rollout.sglang import engine as sglang
from megarl.rollout.sglang.server import ServerFailed
from tests.rollout.engines import stage_recipe

SETTINGS = Settings("cuda", context=4096, responses=512, memory_fraction=0.3)


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


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="rollout.engine: unknown; did you mean 'sglang'"):
        stage_recipe("sglan", model={"path": "unused"})
    with pytest.raises(UserError, match=r"stages.0.engine: unknown; known are builtin, vllm, sglang \(got 'q'\)"):
        stage_recipe("vllm", model={"path": "unused"}, stages={"0": {"engine": "q"}})


def test_the_hour_in_which_a_process_was_suspended_does_not_count_for_a_timeout(monkeypatch):
    clock, response = [10.0, 20.0, 3620.0, 3660.0], Running(0, 0, 0, [1], seed=0, done=0, limit=9, timeout=100.0)
    for name in ("seconds", "read"):
        monkeypatch.setattr(common._Awake, name, 0.0)
    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: clock.pop(0)))
    response.begin()
    assert [common.awake_seconds() > response.deadline for _ in range(3)] == [False, False, True]


def fault_of(logprobs, reason="stop", tokens=None, most=4):
    tokens = range(len(logprobs)) if tokens is None else tokens
    found = Completion(0, 0, np.array(tokens, np.int32), np.array(logprobs, np.float32), reason, None, 0)
    return fault(found, most, 39)


WRONG = [  # log-probs, finish reason, tokens -> what is wrong
    # vLLM and SGLang return them for logits that are not finite: TRL's issue 6166
    *(([-0.5, value], "stop", None, "the log-prob .* is not a finite") for value in (np.nan, np.inf, -np.inf, 1e-3)),
    ([-0.5, np.nan], "interrupted", None, "the log-prob .* is not a finite"),
    ([], "stop", None, "0 tokens with 0 log-probs"),
    ([-1.0], "stop", [3, 4], "2 tokens with 1 log-probs"),
    ([-1.0], "stop", [[3]], "1 tokens with 1 log-probs"),
    ([-1.0], "stop", [-3], r"token -3 is outside the vocabulary \[0, 39\)"),
    # verl 1398, vLLM 13175, OpenRLHF 1117, NeMo-RL 237: ids beyond the vocabulary
    ([-1.0, -2.0], "stop", [3, 39], "token 39 is outside"),
    ([-1.0] * 5, "length", None, "5 tokens are more than the 4 that were asked for"),
    # finish reasons of vLLM and SGLang that are no end of a response, and others
    *(([-1.0], reason, None, "finish reason") for reason in ("abort", "error", "repetition", "unfinished", "", None)),
    ([-1.0], "{'type': 'abort', 'message': 'NaN in the logits'}", None, "NaN in the logits"),
]


@pytest.mark.parametrize(("logprobs", "reason", "tokens", "why"), WRONG)
def test_what_is_a_fault_of_an_engine(logprobs, reason, tokens, why):
    assert re.search(why, fault_of(logprobs, reason, tokens))


def test_what_is_no_fault_of_an_engine():
    for reason in ("stop", "length", "timeout", "interrupted"):
        assert fault_of([0.0, -1e-30, 5e-5, -3e38], reason, [0, 38, 1, 1]) is None
    assert fault_of([], "interrupted", most=0) is None


def test_wide_integers_of_an_engine_are_not_cut_to_other_tokens():
    """A token id of vLLM's issue 26797, which int32 does not hold."""
    engine = object.__new__(sglang.SglangEngine)
    engine.settings = Settings("cpu", context=64, responses=1)
    engine.version, engine._done, engine._done_tokens = 0, 0, 0
    running = Running(0, 0, 0, tokens=[1], seed=0, done=0, limit=1, timeout=60.0)
    for token in (5279552648203111001, -(2**40)):
        _, found = engine._completion(running, np.array([token]), np.array([-1.0]), "stop")
        assert "is outside" in fault(found, 1, 39)


MEMORY = {  # what vLLM, SGLang, torch and CUDA say -> whether memory ran out
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB": True,
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": True,
    "To serve at least one request with the models's max seq len (4096), (0.4 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (0.1 GiB)": True,
    "Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9)": True,
    "Available memory on node 0 (1/4 GiB) on kv cache allocation is less than requested memory for kv (2)": True,
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes": True,
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.": True,
    "The memory pool size is too small": True,
    # vLLM 6976, 8025
    "CUDA error: an illegal memory access was encountered": False,
    "NCCL error: unhandled system error: Failed to open shared memory segment": False,
}


@pytest.mark.parametrize(("module", "kind"), [(vllm, RuntimeError), (sglang, ServerFailed)])
def test_only_a_lack_of_memory_is_a_mistake_of_the_recipe(module, kind):
    """The error names the settings that limit memory."""
    words = "memory_fraction = 0.3.*responses_per_prompt = 512.*tokens = 4096"
    for said, lacks in MEMORY.items():
        expected = pytest.raises(UserError, match=words) if lacks else pytest.raises(kind, match="the last lines")
        with expected, module._memory_errors("decoding", SETTINGS):
            raise kind(f"{said}\nthe last lines")


def test_a_request_is_taken_while_fewer_responses_run_than_may_and_the_cache_has_room():
    engine = object.__new__(vllm.VllmEngine)
    engine.settings, engine.cache_tokens = Settings("cpu", context=100, responses=6), 250

    def room(done, tokens):
        engine._done, engine._done_tokens, rooms = done, tokens, []
        for running in range(8):
            engine._running = dict.fromkeys(range(running))
            rooms.append(engine.has_room())
        return rooms.count(True)

    assert room(0, 0) == 2, "each may become as long as the context"
    assert room(90, 900) == 6, "most were short: the limit of the recipe is reached first"
    assert room(90, 9000) == 2


def test_an_attempt_too_many_is_an_engine_fault(capfd):
    discarded = 0
    for _ in range(MOST_DISCARDED):
        discarded = discard("it is odd", "response 2", discarded)
    with pytest.raises(EngineFault, match="response 2 wrongly 4 times, the last time because it is odd"):
        discard("it is odd", "response 2", discarded)
    assert not issubclass(EngineFault, UserError)
    assert capfd.readouterr().err.count("response 2 is generated again with another seed") == MOST_DISCARDED


HF = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 200, "sparse_layers": [0, 1, 2]}


def test_recorded_experts_that_no_router_returns_are_wrong():
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
        assert message in checked_experts(wrong, 9, HF, cut_off=True)
    for wrong in (None, routed[:8], routed[:, :2]):
        assert re.search(r"of the shape .*, not \(9, 3, 2\)", checked_experts(wrong, 9, HF, cut_off=False))
    single = np.zeros((200, 3, 1), np.uint8)
    assert "same expert for all tokens" in checked_experts(single, 200, HF | {"num_experts_per_tok": 1}, cut_off=False)
