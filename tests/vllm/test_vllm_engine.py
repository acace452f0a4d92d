"""vLLM against the Hugging Face model, the built-in engine and the actor; its seeds, limits, queue and weight loads."""

import itertools
import json
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.errors import UserError
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.drift import check_weights, hugging_face_reference
from megarl.rollout.engine import Request, Sampling, response_seed
from tests.helpers import ROOT
from tests.rollout.tiny_models import save

PROMPTS = [[5, 9, 3, 30, 12, 38, 7], [11, 4], [20, 21, 22, 23], [8], [33, 2, 9, 14], [2, 3, 5, 7, 11, 13, 17, 19, 23]]
TOLERANCE = 1e-4  # nats
MOE = pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)  # for what is the same for both


def sampling(prompts, samples=3, tokens=10, temperature=1.0, stop=(1, 6, 17), seed=0, **more):
    seeds = tuple(response_seed(seed, i, k) for i in range(len(prompts)) for k in range(samples))
    return Sampling(temperature, tokens, samples, stop, seeds, **more)


def by_response(completions):
    completions = list(completions)
    table = {(c.prompt, c.sample): c for c in completions}
    assert len(table) == len(completions)
    return table


@torch.inference_mode()
def hugging_face(path, before, tokens, temperature):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([[*before, *tokens]])
    logprobs = (model(ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[len(before) - 1 :, 0].numpy()


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return [save(folder / str(seed), request.param, seed=seed, head_dim=32) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(model):
    from megarl.rollout.vllm import Settings, VllmEngine

    before = set(psutil.Process().children(recursive=True))
    engine = VllmEngine(model[0], 3, Settings("cpu", context=64, responses=6))
    yield engine
    engine.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_vllm_the_builtin_engine_and_the_actor_agree(engine, model):
    table = by_response(engine.generate(PROMPTS, sampling(PROMPTS)))
    assert sorted(table) == [(i, k) for i in range(len(PROMPTS)) for k in range(3)]
    sequences = [PROMPTS[i] + c.tokens.tolist() for (i, _), c in table.items()]
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.actor_scores", str(model[0])]
    actor = subprocess.run(command, cwd=ROOT, input=json.dumps(sequences), capture_output=True, text=True)
    assert actor.returncode == 0, actor.stderr
    actors = [np.array(scores, np.float32) for scores in json.loads(actor.stdout.splitlines()[-1])]
    for scores in (actors, BuiltinEngine(model[0], 0).score(sequences), engine.score(sequences)):
        for c, expected in zip(table.values(), scores, strict=True):
            assert c.logprobs.dtype == np.float32
            assert c.tokens.dtype == np.int32
            np.testing.assert_allclose(c.logprobs, expected[-len(c.tokens) :], rtol=0, atol=TOLERANCE)


def test_logprobs_are_of_the_distribution_that_was_sampled(engine, model):
    for c in engine.generate(PROMPTS, sampling(PROMPTS, temperature=0.7)):
        expected = hugging_face(model[0], PROMPTS[c.prompt], c.tokens, 0.7)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=TOLERANCE)
        assert c.policy_version == 3


@MOE
def test_a_response_follows_from_its_own_seed(engine):
    """Not from its place in the request, nor from what stands beside it."""
    request = sampling([[8]], samples=6, stop=())
    forward = by_response(engine.generate([[8]], request))
    assert len({tuple(c.tokens) for c in forward.values()}) == 6
    backward = by_response(engine.generate([[8]], Sampling(1.0, 10, 6, (), request.seeds[::-1])))
    alone = by_response(engine.generate([[8]], Sampling(1.0, 10, 1, (), request.seeds[2:3])))
    for k in range(6):
        assert backward[0, 5 - k].tokens.tolist() == forward[0, k].tokens.tolist()
    assert alone[0, 0].tokens.tolist() == forward[0, 2].tokens.tolist()


@MOE
def test_stop_tokens_and_length(engine):
    table = by_response(engine.generate(PROMPTS, sampling(PROMPTS, samples=10, stop=(4, 30))))
    for c in table.values():
        stops = np.isin(c.tokens, [4, 30])
        assert not stops[:-1].any()
        assert c.finish_reason == ("stop" if stops[-1] else "length")
        assert len(c.tokens) == len(c.logprobs) and (len(c.tokens) == 10 or c.finish_reason == "stop")
    reasons = [c.finish_reason for c in table.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 5
    # the model's own end-of-sequence token is none of ours
    unstopped = by_response(engine.generate(PROMPTS, sampling(PROMPTS, samples=10, stop=())))
    assert {len(c.tokens) for c in unstopped.values()} == {10}


@MOE
def test_the_next_request_is_taken_as_soon_as_there_is_room(engine):
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), 20))
    served, taken = [], []

    def feed():
        for number, prompt in enumerate(prompts):
            taken.append((number, len(served)))
            yield Request([prompt], sampling([prompt], samples=2, seed=number, stop=(4, 30, 17, 22)))

    for number, completion in engine.serve(feed()):
        served.append((number, completion.sample))
    assert sorted(served) == [(number, k) for number in range(20) for k in range(2)]
    assert [ended for _, ended in taken[:3]] == [0, 0, 0]  # six responses at once
    # one is taken when fewer than six are at work: never before, and not only when a request has ended as a whole
    at_work = [2 * number - ended for number, ended in taken]
    assert max(at_work) <= 5
    assert sum(n >= 4 for n in at_work[3:]) > 10


@MOE
def test_interrupted_responses_can_be_continued(engine, model):
    request = Request(PROMPTS[:2], sampling(PROMPTS[:2], stop=()))
    polls = itertools.count()
    partial = by_response(c for _, c in engine.serve(iter([request, request]), lambda: next(polls) >= 9))
    assert sorted(partial) == [(i, k) for i in range(2) for k in range(3)]
    assert {c.finish_reason for c in partial.values()} == {"interrupted"}
    prefixes = tuple(tuple(partial[i, k].tokens.tolist()) for i in range(2) for k in range(3))
    assert all(0 < len(prefix) < 10 for prefix in prefixes)
    rest = by_response(engine.generate(PROMPTS[:2], sampling(PROMPTS[:2], stop=(), prefixes=prefixes)))
    for (i, k), c in rest.items():
        assert len(partial[i, k].tokens) + len(c.tokens) == 10
        before = [*PROMPTS[i], *partial[i, k].tokens]
        expected = hugging_face(model[0], before, c.tokens, 1.0)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=TOLERANCE)
        expected = hugging_face(model[0], PROMPTS[i], partial[i, k].tokens, 1.0)
        np.testing.assert_allclose(partial[i, k].logprobs, expected, rtol=0, atol=TOLERANCE)


@MOE
def test_a_stuck_response_is_cut_off(engine):
    cut = list(engine.generate(PROMPTS, sampling(PROMPTS, stop=(), timeout=1e-9)))
    assert {(c.finish_reason, len(c.tokens)) for c in cut} == {("timeout", 1)}  # none is empty
    assert all(len(c.logprobs) == 1 for c in cut)


@MOE
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [2, 39, 3]], r"prompt 1 has token 39, outside .* \[0, 39\)"),
        ([[1], [2, -1]], "prompt 1 has token -1"),
        ([[1] * 54, [1] * 55], "prompt 1 has 55 tokens; with 10 response tokens .* 64 positions"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_serves_on(engine, prompts, message):
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, sampling(prompts))
    good, bad = Request([[8]], sampling([[8]])), Request(prompts, sampling(prompts))
    with pytest.raises(UserError, match=message):
        list(engine.serve(iter([good, bad])))
    assert len(list(engine.generate([[8]], sampling([[8]])))) == 3  # nothing is left over of the last
    with pytest.raises(UserError, match=r"temperature 2.5: vLLM samples at 0.01 to 2.0"):
        engine.generate([[8]], sampling([[8]], temperature=2.5))


def test_wrong_weights_are_caught_after_every_load(engine, model):
    """vLLM's in-place reload of experts on a CPU is wrong without an error: the check is what stands between."""
    first, second = (hugging_face_reference(path) for path in model)
    assert check_weights(engine, first).max < TOLERANCE
    with pytest.raises(UserError, match="weights are not the policy's.* nats off"):
        check_weights(engine, second)
    experts = engine._has_experts
    engine.policy_dir = model[1]
    engine._reload()
    if experts:
        with pytest.raises(UserError, match="weights are not the policy's.* nats off"):
            check_weights(engine, second)
    else:
        assert check_weights(engine, second).max < TOLERANCE
    engine.load_weights(model[1], 7)
    assert check_weights(engine, second).max < TOLERANCE
    (c, *_) = engine.generate([[8]], sampling([[8]], samples=1))
    assert c.policy_version == 7
    np.testing.assert_allclose(c.logprobs, hugging_face(model[1], [8], c.tokens, 1.0), rtol=0, atol=TOLERANCE)


@MOE
def test_sleep_makes_room_for_other_engines(engine, model):
    """One too small for the memory, and one whose prompts do not fit into a step together."""
    from megarl.rollout.vllm import CPU_STEP, Settings, VllmEngine

    engine.sleep()
    with pytest.raises(RuntimeError, match="call wake"):
        engine.generate([[8]], sampling([[8]]))
    with pytest.raises(UserError, match=r"memory.*memory_fraction = 1e-09 .*groups_per_chunk.*max_response_tokens"):
        VllmEngine(model[0], 0, Settings("cpu", context=64, responses=6, memory_fraction=1e-9))
    large = VllmEngine(model[0], 0, Settings("cpu", context=64, responses=100))
    prompts = [[i % 39] * 53 for i in range(100)]
    assert len(prompts) * 53 > CPU_STEP
    assert len(list(large.generate(prompts, sampling(prompts, samples=1, tokens=2)))) == 100
    large.close()
    engine.wake()
    assert len(list(engine.generate([[8]], sampling([[8]])))) == 3
