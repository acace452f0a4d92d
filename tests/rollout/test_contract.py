"""The contract of all rollout engines: log-probs, seeds, limits, queue, interruption, weights.

All tests share one running engine for each model.
"""

import itertools
import math
import threading

import numpy as np
import psutil
import pytest
import torch

from megarl.rollout.drift import measure_drift
from megarl.rollout.engine import EngineFault, Request, Sampling
from tests.rollout.engines import (
    BOTH,
    CONTEXT,
    LONG,
    MOE,
    PROMPTS,
    TOGETHER,
    TOLERANCE,
    by_response,
    generate,
    hugging_face,
    hugging_face_logprobs,
    on,
    other_policy,
    reference_of,
    sampling,
    serve,
    started,
)

CONTINUOUS = started("qwen3_moe", "vllm", "sglang")
AGAINST_HUGGING_FACE = {"builtin": 1e-5}  # nats: it runs transformers' model
LENGTHS_WHEN_LATE = {"builtin": {2}, "vllm": {1}, "sglang": set(range(1, LONG))}  # tokens; at least one


@on(BOTH)
def test_log_probs_are_those_of_transformers_and_of_the_engines_own_scores(engine, name, records_experts):
    table = generate(engine, PROMPTS, sampling(PROMPTS, stop=(1, 6, 17)))
    assert sorted(table) == [(i, k) for i in range(len(PROMPTS)) for k in range(3)]
    sequences = [PROMPTS[i] + c.tokens.tolist() for (i, _), c in table.items()]
    for c, sequence, own in zip(table.values(), sequences, engine.score(sequences), strict=True):
        assert (c.tokens.dtype, c.logprobs.dtype) == (np.int32, np.float32)
        assert c.policy_version == engine.version
        np.testing.assert_allclose(c.logprobs, own[-len(c.tokens) :], rtol=0, atol=TOLERANCE)
        expected = hugging_face_logprobs(engine.policy_dir, sequence[:1], sequence[1:])
        np.testing.assert_allclose(own, expected, rtol=0, atol=TOLERANCE)
        assert (c.routed_experts is not None) == records_experts
    check(engine, PROMPTS, table.values(), AGAINST_HUGGING_FACE.get(name, TOLERANCE))


def check(engine, prompts, completions, tolerance=TOLERANCE, temperature=1.0):
    """Compare log-probs of completions with those of transformers."""
    for c in completions:
        expected = hugging_face_logprobs(engine.policy_dir, prompts[c.prompt], c.tokens, temperature)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=tolerance)


@on(MOE)
def test_log_probs_are_of_the_distribution_that_was_sampled(engine, name):
    table = generate(engine, PROMPTS, sampling(PROMPTS, temperature=0.7))
    check(engine, PROMPTS, table.values(), AGAINST_HUGGING_FACE.get(name, TOLERANCE), 0.7)


@on(MOE)
def test_top_p_samples_only_from_the_smallest_set_of_tokens_with_that_probability(engine, name):
    """More than one token of the set occurs. Log-probs are renormalised over the set (SGLang's are not)."""
    first, kept_first = set(), 0
    for c in generate(engine, PROMPTS[:2], sampling(PROMPTS[:2], samples=60, tokens=4, top_p=0.4)).values():
        everything = hugging_face(engine.policy_dir, PROMPTS[c.prompt], c.tokens)
        ordered, order = everything.sort(descending=True)
        kept = (ordered.exp().cumsum(-1) - ordered.exp() < 0.4 - 1e-6).sum(-1)
        for step, token in enumerate(c.tokens.tolist()):
            assert token in order[step, : kept[step]], (step, token)
        nucleus = [everything[step, order[step, : kept[step]]].logsumexp(0) for step in range(len(c.tokens))]
        whole = everything.gather(1, torch.tensor(c.tokens.tolist())[:, None])[:, 0].numpy()
        expected = whole if name == "sglang" else whole - np.array(nucleus, np.float32)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=TOLERANCE)
        if c.prompt == 0:
            first.add(int(c.tokens[0]))
            kept_first = int(kept[0])
    assert 1 < len(first) <= kept_first < 30


@on(MOE)
def test_temperature_0_takes_the_most_probable_token(engine, name):
    table = generate(engine, PROMPTS, sampling(PROMPTS, samples=2, temperature=0.0))
    for c in table.values():
        assert c.tokens.tolist() == hugging_face(engine.policy_dir, PROMPTS[c.prompt], c.tokens).argmax(-1).tolist()
    check(engine, PROMPTS, table.values())


@on(CONTINUOUS)
def test_nothing_listens_beyond_loopback(engine):
    processes = (psutil.Process(), *psutil.Process().children(recursive=True))
    found = [connection for process in processes for connection in process.net_connections("inet")]
    listening = [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}


@on(MOE)
def test_a_response_depends_on_its_own_seed_alone(engine):
    """It depends neither on its position in the request nor on the other responses in the batch."""
    request = sampling([[8]], samples=6)
    forward = generate(engine, [[8]], request)
    assert len({tuple(c.tokens) for c in forward.values()}) == 6
    backward = generate(engine, [[8]], Sampling(1.0, 10, 6, (), request.seeds[::-1]))
    alone = generate(engine, [[8]], Sampling(1.0, 10, 1, (), request.seeds[2:3]))
    assert all(backward[0, 5 - k].tokens.tolist() == forward[0, k].tokens.tolist() for k in range(6))
    assert alone[0, 0].tokens.tolist() == forward[0, 2].tokens.tolist()


@on(MOE)
def test_a_response_ends_at_a_stop_token_or_at_the_token_limit(engine, name):
    table = generate(engine, PROMPTS, sampling(PROMPTS, samples=10, stop=(4, 30)))
    for c in table.values():
        stops = np.isin(c.tokens, [4, 30])
        assert not stops[:-1].any()
        assert c.finish_reason == ("stop" if stops[-1] else "length")
        assert len(c.tokens) == len(c.logprobs) and (len(c.tokens) == 10 or c.finish_reason == "stop")
    reasons = [c.finish_reason for c in table.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 5
    # without stop tokens every response reaches the token limit, even after the longest prompt that fits
    prompts = [*PROMPTS, [1] * (positions(name) - 10)]
    assert {len(c.tokens) for c in generate(engine, prompts, sampling(prompts)).values()} == {10}


def positions(name):
    """The engine's context length: the model's positions, or the longest sequence of the recipe."""
    return 128 if name == "builtin" else CONTEXT


@on(MOE)
def test_interrupted_responses_are_continued(engine, name, records_experts, monkeypatch):
    """Both parts together have the right log-probs.

    With the built-in engine and SGLang, whose random numbers depend on the position, they equal the response that was
    not interrupted.
    """
    prompts, length = PROMPTS[:2], LONG if name == "sglang" else 12
    request = Request(prompts, sampling(prompts, tokens=length))
    whole = generate(engine, prompts, request.sampling)
    partial = by_response(c for _, c in serve(engine, [request, request], midway(engine, name, monkeypatch)))
    assert sorted(partial) == sorted(whole)
    assert {c.finish_reason for c in partial.values()} == {"interrupted"}
    prefixes = tuple(tuple(partial[key].tokens.tolist()) for key in sorted(partial))
    assert any(prefixes) and (name == "sglang" or all(prefixes)) and all(len(prefix) < length for prefix in prefixes)
    rest = generate(engine, prompts, sampling(prompts, tokens=length, prefixes=prefixes))
    for key, c in rest.items():
        tokens, logprobs = ([*getattr(partial[key], part), *getattr(c, part)] for part in ("tokens", "logprobs"))
        assert len(tokens) == length
        expected = hugging_face_logprobs(engine.policy_dir, prompts[key[0]], tokens)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=TOLERANCE)
        if name != "vllm":
            assert tokens == whole[key].tokens.tolist()
        if records_experts:
            np.testing.assert_array_equal(np.sort(c.routed_experts), np.sort(whole[key].routed_experts))


@on(MOE)
def test_a_budget_limits_the_tokens_that_a_request_adds(engine, name):
    """The prefix of a response is not counted; ``max_tokens``, of the whole response, still holds."""
    prompts = PROMPTS[:2]
    begun = generate(engine, prompts, sampling(prompts, tokens=9, budget=4))
    assert {(len(c.tokens), c.finish_reason) for c in begun.values()} == {(4, "length")}
    prefixes = tuple(tuple(begun[key].tokens[: place % 4].tolist()) for place, key in enumerate(sorted(begun)))
    rest = generate(engine, prompts, sampling(prompts, tokens=6, prefixes=prefixes, budget=4))
    for prefix, key in zip(prefixes, sorted(begun), strict=True):
        c = rest[key]
        assert (len(c.tokens), c.finish_reason) == (min(4, 6 - len(prefix)), "length")
        if name != "vllm":
            assert [*prefix, *c.tokens.tolist()][:4] == begun[key].tokens.tolist()


def midway(engine, name, monkeypatch):
    """An ``interrupted`` callback that becomes true while responses are being decoded."""
    if name != "sglang":
        polls = itertools.count()
        return lambda: next(polls) >= 9
    begun, stream = threading.Event(), engine._server.stream

    def watched(*arguments):
        for event in stream(*arguments):
            begun.set()
            yield event

    monkeypatch.setattr(engine._server, "stream", watched)
    return begun.is_set


@on(CONTINUOUS)
def test_the_timeout_of_a_queued_response_is_counted_from_its_first_token(engine, monkeypatch):
    """One request has twelve responses, of which the engine decodes six at a time."""
    begun, step = [], engine._step

    def watched():
        ended = step()
        begun.append([math.isfinite(response.deadline) for response in engine._running.values()])
        return ended

    monkeypatch.setattr(engine, "_step", watched)
    prompts = PROMPTS[:4]
    asked = sampling(prompts, tokens=12, timeout=100.0)
    assert len(generate(engine, prompts, asked)) == 12
    assert TOGETHER * CONTEXT <= engine.cache_tokens < 2 * TOGETHER * CONTEXT
    assert sum(begun[0]) <= TOGETHER < len(begun[0]) == 12
    assert any(running and all(running) for running in begun)


@on(MOE)
def test_a_response_that_takes_too_long_is_cut_off(engine, name):
    prompts = PROMPTS if name != "sglang" else PROMPTS[:1]
    cut = generate(engine, prompts, sampling(prompts, tokens=LONG, timeout=1e-9))
    assert len(cut) == 3 * len(prompts)
    assert {c.finish_reason for c in cut.values()} == {"timeout"}
    assert {len(c.tokens) for c in cut.values()} <= LENGTHS_WHEN_LATE[name]
    check(engine, prompts, cut.values())


@on(MOE)
def test_an_abort_ends_the_responses_still_running(engine, name):
    def feed():
        yield Request(PROMPTS[:1], sampling(PROMPTS[:1], samples=1, tokens=1))
        yield Request(PROMPTS, sampling(PROMPTS, tokens=LONG, samples=20))

    expected = generate(engine, [[8]], sampling([[8]]))
    responses = serve(engine, feed())
    next(responses)
    responses.close()
    if name == "vllm":
        assert not engine._engine.has_unfinished_requests()
    if name == "sglang":
        for thread in threading.enumerate():
            if "_stream" in thread.name:
                thread.join(60)
                assert not thread.is_alive()
    after = generate(engine, [[8]], sampling([[8]]))
    assert {key: c.tokens.tolist() for key, c in after.items()} == {k: c.tokens.tolist() for k, c in expected.items()}


@on(BOTH)
def test_the_engine_has_the_weights_that_were_loaded_last(engine):
    first, second = (reference_of(path) for path in (engine.policy_dir, other_policy(engine)))
    assert measure_drift(engine, first).max < TOLERANCE
    with pytest.raises(EngineFault, match="weights are not the policy's.* nats off"):
        measure_drift(engine, second)
    engine.load_weights(other_policy(engine), 7)
    assert measure_drift(engine, second).max < TOLERANCE
    (c,) = generate(engine, [[8]], sampling([[8]], samples=1)).values()
    assert c.policy_version == 7
    check(engine, [[8]], [c])


@on(MOE)
def test_loading_weights_drops_cached_prompts(engine):
    """A prompt that fills several blocks of the cache is answered by one policy, then by the other."""
    prompt = [token % 39 for token in range(80)]
    for policy in (engine.policy_dir, other_policy(engine)):
        engine.load_weights(policy, 5)
        check(engine, [prompt], generate(engine, [prompt], sampling([prompt])).values())


@on(started("qwen3_moe", "builtin", "sglang"))  # for vLLM see test_vllm.py
def test_an_engine_that_slept_has_the_weights_that_it_loads(engine):
    engine.sleep()
    engine.load_weights(engine.policy_dir, engine.version)
    assert measure_drift(engine, reference_of(engine.policy_dir)).max < TOLERANCE
