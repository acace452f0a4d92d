"""The built-in engine against transformers' full forward pass, against itself, and against its own distribution."""

import gc
import hashlib
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.errors import UserError
from megarl.rollout.builtin import DRAWS, BuiltinEngine, _Decoder
from megarl.rollout.engine import Sampling, response_seed
from tests.helpers import ROOT
from tests.rollout.tiny_models import save

PROMPTS = [
    [5, 9, 3, 30, 12, 38, 7],
    [11, 4],
    [20, 21, 22, 23],
    [8],
    [33, 2, 9, 14],
    [2, 3, 5, 7, 11, 13, 17, 19, 23, 29],
]


def sampling(prompts, samples=3, max_tokens=10, temperature=1.0, stop=(1, 6, 17), seed=0):
    seeds = tuple(response_seed(seed, i, k) for i in range(len(prompts)) for k in range(samples))
    return Sampling(temperature, max_tokens, samples, stop, seeds)


def by_response(completions):
    completions = list(completions)
    table = {(c.prompt, c.sample): c for c in completions}
    assert len(table) == len(completions)
    return table


@torch.inference_mode()
def full_forward(model_dir, prompt, tokens, temperature):
    """[n, V] float32 log-probs of every token of one response: one pass, no cache, no batch, plain attention."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    logits = model(input_ids=torch.tensor([[*prompt, *tokens.tolist()]]), use_cache=False).logits
    return (logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3", "mistral_sliding_window"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(tmp_path, kind, temperature):
    path = save(tmp_path, kind)
    table = by_response(BuiltinEngine(path, 3).generate(PROMPTS, sampling(PROMPTS, temperature=temperature)))
    assert sorted(table) == [(i, k) for i in range(len(PROMPTS)) for k in range(3)]
    for (i, _), c in table.items():
        expected = full_forward(path, PROMPTS[i], c.tokens, temperature)
        chosen = expected[torch.arange(len(c.tokens)), torch.from_numpy(c.tokens).long()].numpy()
        assert c.logprobs.dtype == np.float32
        assert c.tokens.dtype == np.int32
        assert c.policy_version == 3
        np.testing.assert_allclose(c.logprobs, chosen, rtol=0, atol=1e-5)


def test_tokens_are_the_inverse_cdf_at_the_philox_numbers_of_the_seed(moe_dir):
    """An independent reading of the definition, over more than one block of draws."""
    request = sampling(PROMPTS[:2], samples=2, max_tokens=DRAWS + 20, stop=(), seed=5)
    table = by_response(BuiltinEngine(moe_dir, 0).generate(PROMPTS[:2], request))
    for (i, k), c in table.items():
        uniforms = np.random.Generator(np.random.Philox(key=request.seeds[2 * i + k])).random(len(c.tokens))
        cdf = full_forward(moe_dir, PROMPTS[i], c.tokens, 1.0).double().exp().cumsum(-1).numpy()
        expected = [int(np.searchsorted(row, u * row[-1], side="right")) for row, u in zip(cdf, uniforms, strict=True)]
        assert c.tokens.tolist() == expected


def test_one_by_one_gives_the_same_responses_as_a_mixed_chunk(moe_dir):
    engine = BuiltinEngine(moe_dir, 0)
    request = sampling(PROMPTS, samples=3)
    together = by_response(engine.generate(PROMPTS, request))
    for i, prompt in enumerate(PROMPTS):
        for k in range(3):
            alone = Sampling(1.0, 10, 1, request.stop_token_ids, (request.seeds[3 * i + k],))
            (c,) = engine.generate([prompt], alone)
            assert c.tokens.tolist() == together[i, k].tokens.tolist()
            assert c.finish_reason == together[i, k].finish_reason
            np.testing.assert_allclose(c.logprobs, together[i, k].logprobs, rtol=0, atol=1e-5)


def test_stop_tokens_length_and_order(moe_dir):
    table = by_response(BuiltinEngine(moe_dir, 0).generate(PROMPTS, sampling(PROMPTS, samples=20, stop=(4, 30))))
    for c in table.values():
        stops = np.isin(c.tokens, [4, 30])
        assert not stops[:-1].any()
        assert c.finish_reason == ("stop" if stops[-1] else "length")
        assert len(c.tokens) == 10 or c.finish_reason == "stop"
    reasons = [c.finish_reason for c in table.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 10
    ends = [len(PROMPTS[c.prompt]) + len(c.tokens) for c in table.values()]
    assert ends == sorted(ends)  # as they finish: all rows stand at one position
    without = by_response(BuiltinEngine(moe_dir, 0).generate(PROMPTS, sampling(PROMPTS, samples=20, stop=())))
    assert {len(c.tokens) for c in without.values()} == {10}
    for key, c in table.items():  # stopping cuts a response short and changes nothing else
        assert without[key].tokens[: len(c.tokens)].tolist() == c.tokens.tolist()


CHI2_999_OF_1000 = {6: 22.458, 48: 84.037}  # quantiles of the chi-square distribution by degrees of freedom


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sampled_pairs_follow_the_model(tmp_path, temperature):
    path, prompt, n = save(tmp_path, vocabulary=7, spread=0.1), [3, 1, 4], 8192
    request = sampling([prompt], samples=n, max_tokens=2, temperature=temperature, stop=())
    pairs = np.stack([c.tokens for c in BuiltinEngine(path, 0).generate([prompt], request)])
    first = full_forward(path, prompt, np.array([0]), temperature)[0].exp()
    second = torch.stack([full_forward(path, prompt, np.array([a, 0]), temperature)[1].exp() for a in range(7)])
    expected = n * (first[:, None] * second).double().numpy()
    observed = np.zeros((7, 7))
    np.add.at(observed, (pairs[:, 0], pairs[:, 1]), 1)
    assert expected.min() > 1  # else the statistic is no chi-square
    assert ((observed.sum(1) - expected.sum(1)) ** 2 / expected.sum(1)).sum() < CHI2_999_OF_1000[6]
    assert ((observed - expected) ** 2 / expected).sum() < CHI2_999_OF_1000[48]


def test_a_token_of_probability_zero_is_never_sampled(moe_dir):
    decoder = _Decoder(BuiltinEngine(moe_dir, 0)._model, sampling([[1]]), 3)
    logits = torch.full((4, 39), float("-inf"))
    logits[:, 5:8] = torch.tensor([1.0, 2.0, 3.0])
    decoder.logits = logits
    tokens, logprobs, _ = decoder.sample(np.array([0.0, np.nextafter(1.0, 0.0), 0.05, 0.5]))
    assert tokens.tolist() == [5, 7, 5, 7]
    expected = torch.tensor([1.0, 2.0, 3.0]).log_softmax(0)
    np.testing.assert_allclose(logprobs, expected[[0, 2, 0, 2]], atol=1e-6)
    # the largest uniform below 1, at totals on both sides of 1
    decoder.logits = torch.randn(2000, 39, generator=torch.Generator().manual_seed(0))
    decoder.logits[:, 35:] = float("-inf")
    tokens, _, _ = decoder.sample(np.full(2000, np.nextafter(1.0, 0.0)))
    assert set(tokens.tolist()) == {34}


DIGEST = """
import hashlib, torch
torch.set_num_threads(1)
from tests.rollout.test_builtin import PROMPTS, digest
print(digest({model!r}))
"""


def digest(model_dir):
    prompts = PROMPTS * 8
    table = by_response(BuiltinEngine(Path(model_dir), 0).generate(prompts, sampling(prompts, samples=4)))
    payload = b"".join(table[key].tokens.tobytes() + table[key].logprobs.tobytes() for key in sorted(table))
    return hashlib.sha256(payload).hexdigest()


def test_the_same_chunk_gives_the_same_bytes_in_a_fresh_process(moe_dir):
    code = DIGEST.format(model=str(moe_dir))
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert digest(moe_dir) == digest(moe_dir) == fresh.stdout.strip()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [2, 39, 3]], r"prompt 1 has token 39, outside .* \[0, 39\)"),
        ([[1], [2, -1]], "prompt 1 has token -1"),
        ([[1] * 118, [1] * 119], "prompt 1 has 119 tokens; with 10 response tokens .* 128 positions"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_the_call(moe_dir, prompts, message):
    engine = BuiltinEngine(moe_dir, 0)
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, sampling(prompts))
    with pytest.raises(UserError, match="2 prompts with 3 samples each need 6 seeds, got 3"):
        engine.generate([[1], [2]], sampling([[1]]))
    longest = [[1] * 118]
    assert len(list(engine.generate(longest, sampling(longest, stop=())))) == 3


def test_experts_take_the_fast_path(moe_dir):
    """grouped_mm; transformers' batched_mm is 20 times slower on a CPU."""
    assert BuiltinEngine(moe_dir, 0)._model.config._experts_implementation == "grouped_mm"


def test_new_weights_sleep_and_wake(moe_dir, tmp_path):
    engine = BuiltinEngine(moe_dir, 0)
    request = sampling(PROMPTS)

    def answers():
        table = by_response(engine.generate(PROMPTS, request))
        return {key: (c.tokens.tolist(), c.logprobs.tobytes(), c.policy_version) for key, c in table.items()}

    before = answers()
    weights = weakref.ref(next(engine._model.parameters()))
    engine.sleep()
    gc.collect()
    assert weights() is None
    with pytest.raises(RuntimeError, match="call wake"):
        engine.generate(PROMPTS, request)
    engine.wake()
    assert answers() == before
    engine.load_weights(save(tmp_path / "other", seed=1), 7)
    after = answers()
    fresh = by_response(BuiltinEngine(tmp_path / "other", 7).generate(PROMPTS, request))
    assert after == {key: (c.tokens.tolist(), c.logprobs.tobytes(), 7) for key, c in fresh.items()}
    assert after != before
    engine.close()
