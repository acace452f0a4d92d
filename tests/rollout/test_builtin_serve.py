"""Requests to `BuiltinEngine`: several requests, an interruption, responses that time out."""

import itertools

import numpy as np

from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.engine import Request, Sampling
from tests.rollout.engines import PROMPTS, by_response, generate, sampling, serve


def test_requests_are_served_one_after_another_with_the_same_results_as_alone(moe_dir):
    engine = BuiltinEngine(moe_dir, 0)
    requests = [Request(PROMPTS[i : i + 2], sampling(PROMPTS[i : i + 2], stop=(1, 6, 17), seed=i)) for i in (0, 2, 4)]
    taken, served = [], []

    def feed():
        for number, request in enumerate(requests):
            taken.append((number, len(served)))
            yield request

    for number, completion in serve(engine, feed()):
        served.append((number, completion))
    assert taken == [(0, 0), (1, 6), (2, 12)]  # each is taken only when the one before is finished
    for number, request in enumerate(requests):
        mine = by_response(c for n, c in served if n == number)
        alone = generate(engine, request.prompts, request.sampling)
        assert {k: (c.tokens.tolist(), c.logprobs.tobytes()) for k, c in mine.items()} == {
            k: (c.tokens.tolist(), c.logprobs.tobytes()) for k, c in alone.items()
        }


def test_an_interruption_returns_unfinished_responses_and_takes_no_more_requests(moe_dir):
    engine = BuiltinEngine(moe_dir, 0)
    request = Request(PROMPTS, sampling(PROMPTS))
    whole = generate(engine, PROMPTS, request.sampling)
    polls = itertools.count()
    served = list(serve(engine, [request, request], lambda: next(polls) >= 8))
    assert {number for number, _ in served} == {0}
    table = by_response(c for _, c in served)
    assert sorted(table) == sorted(whole)
    lengths = {len(PROMPTS[i]): len(c.tokens) for (i, _), c in table.items()}
    # eight steps were made, the first of them at the end of the shortest prompt (1 token)
    assert lengths == {n: max(0, 9 - n) for n in lengths}
    for key, c in table.items():
        assert c.finish_reason == "interrupted"
        assert c.tokens.tolist() == whole[key].tokens[: len(c.tokens)].tolist()
        np.testing.assert_allclose(c.logprobs, whole[key].logprobs[: len(c.tokens)], rtol=0, atol=1e-6)


def test_tokens_of_responses_that_are_being_decoded_are_counted(moe_dir):
    """Those of a prefix and those of responses that have ended are not among them."""
    engine = BuiltinEngine(moe_dir, 0)
    prefixes = tuple((2,) * k for k in range(3 * len(PROMPTS)))
    engine.submit(0, Request(PROMPTS, sampling(PROMPTS, tokens=20, budget=4, prefixes=prefixes)))
    assert engine.decoding_tokens == 0
    steps = [len(engine.step()) for _ in range(6)]
    assert sum(steps) > 0
    counted = engine.decoding_tokens
    assert counted == sum(len(completion.tokens) for _, completion in engine.interrupt()) > 0
    assert engine.decoding_tokens == 0


def test_a_response_that_times_out_is_cut_off_after_two_tokens(moe_dir):
    engine = BuiltinEngine(moe_dir, 0)
    patient = sampling(PROMPTS)
    hasty = Sampling(1.0, 10, 3, (), patient.seeds, timeout=1e-9)
    whole = generate(engine, PROMPTS, patient)
    for key, c in generate(engine, PROMPTS, hasty).items():
        assert c.finish_reason == "timeout"
        assert c.tokens.tolist() == whole[key].tokens[:2].tolist()  # the timeout is counted from the first token
