"""Shared by the tests of all engines: models, recipes, requests, reference log-probs."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.recipe.load import parse_recipe
from megarl.recipe.names import ENGINES
from megarl.rollout.drift import hugging_face_reference
from megarl.rollout.engine import Request, Sampling, answers, response_seed
from tests.helpers import SGLANG_PYTHON

PROMPTS = [[5, 9, 3, 30, 12, 38, 7], [11, 4], [20, 21, 22, 23], [8], [33, 2, 9, 14], [2, 3, 5, 7, 11, 13, 17, 19, 23]]
TOLERANCE = 1e-4  # nats, between two float32 implementations
LONG = 110  # tokens: so long that a response is still being decoded when a test ends it
CONTEXT = 120  # tokens of the longest prompt with such a response; the models have 128 positions
TOGETHER = 6  # responses that vLLM and SGLang decode together
OWN_OPTION = {"vllm": {"max_logprobs": 7}, "sglang": {"max_prefill_tokens": 5000}}  # not the engines' defaults


def started(family, *names):
    """Parameters of the fixture `engine`, (engine, model family), with the mark of the engine."""
    marks = {"vllm": pytest.mark.vllm, "sglang": pytest.mark.sglang}
    names = names or tuple(ENGINES)
    return [
        pytest.param((name, family), id=f"{name}-{family}", marks=[marks[name]] if name in marks else [])
        for name in names
    ]


MOE = started("qwen3_moe")  # for tests whose result does not depend on the model family
BOTH = [parameter for name in ENGINES for family in ("qwen3_moe", "qwen3") for parameter in started(family, name)]


def on(parameters):
    """Decorator that runs a test with these parameters of the fixture `engine`."""
    return pytest.mark.parametrize("engine", parameters, indirect=True)


def stage_recipe(engine, **tables):
    """A recipe whose rollouts ``engine`` generates; ``tables`` must contain at least "model"."""
    data = {"source": "reasoning_gym", "train": "spell_backward", "options": {"min_word_len": 3, "max_word_len": 8}}
    rollout = {"engine": engine, "max_response_tokens": LONG, "responses_per_prompt": 3, "groups_per_chunk": 2}
    return parse_recipe(
        {
            "data": data | {"prompt_template": "{word}=", "max_prompt_tokens": CONTEXT - LONG},
            "reward": {"kind": "reasoning_gym"},
            "eval": {"every": 0},
            **tables,
            "rollout": rollout | {"sglang_python": str(SGLANG_PYTHON)} | tables.get("rollout", {}),
            "actor": {"backend": "cpu"} | tables.get("actor", {}),
        }
    )


def sampling(prompts, samples=3, tokens=10, temperature=1.0, stop=(), seed=0, **more):
    seeds = tuple(response_seed(seed, i, k) for i in range(len(prompts)) for k in range(samples))
    return Sampling(temperature, tokens, samples, stop, **({"seeds": seeds} | more))


def by_response(completions):
    """{(prompt, sample): completion}; fails if the engine returned a response twice."""
    completions = list(completions)
    table = {(c.prompt, c.sample): c for c in completions}
    assert len(table) == len(completions)
    return table


def generate(engine, prompts, how):
    """The completions of one request as `by_response`, in the order in which they ended."""
    return by_response(answers(engine, Request(prompts, how)))


def serve(engine, requests, interrupted=lambda: False):
    """Serve requests as phases do; yields pairs as `step` returns them."""
    left, number, more = iter(requests), 0, True
    try:
        while more or engine.decoding:
            stopping = interrupted()
            while more and not stopping and engine.has_room():
                request = next(left, "end")
                more = request != "end"
                if more:
                    engine.submit(number, request)
                    number += 1
            if stopping:
                yield from engine.interrupt()
                return
            if engine.decoding:
                yield from engine.step()
    finally:
        engine.abort()


def reference_of(path):
    """Four random sequences with the log-probs that transformers computes for them."""
    tokens = np.random.default_rng(1).integers(39, size=(4, 48)).tolist()
    return hugging_face_reference(path, tokens)


def other_policy(engine):
    """The directory of the family's model that the engine has not loaded."""
    return engine.policy_dir.parent / str(1 - int(engine.policy_dir.name))


@torch.inference_mode()
def hugging_face(path, prompt, tokens, temperature=1.0):
    """[n, V] float32: log-probs of the vocabulary at each token of a response, without a cache."""
    logits = _model(path)(torch.tensor([[*prompt, *map(int, tokens)]]), use_cache=False).logits
    return (logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)


def hugging_face_logprobs(path, prompt, tokens, temperature=1.0):
    """[n] float32: log-probs of the response's own tokens."""
    chosen = torch.tensor([int(token) for token in tokens])[:, None]
    return hugging_face(path, prompt, tokens, temperature).gather(1, chosen)[:, 0].numpy()


@functools.lru_cache(4)
def _model(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
