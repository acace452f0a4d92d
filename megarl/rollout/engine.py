"""The contract of a rollout engine: prompts in, completions with the log-probs of the sampled distribution out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How to sample. One seed a response, prompt-major: ``seeds[prompt * samples + sample]``.

    A response's randomness comes from its seed alone, so it does not depend on what else is in the batch.
    """

    temperature: float  # > 0
    max_tokens: int  # tokens of a response, stop token included
    samples: int  # responses per prompt
    stop_token_ids: tuple[int, ...]  # any of them ends a response and is its last token
    seeds: tuple[int, ...]  # [prompts * samples], each in [0, 2**64)
    # [prompts * samples] tokens of each response that are there already, or (): all begin with the prompt. They count
    # to `max_tokens`; a completion holds what follows them.
    prefixes: tuple[tuple[int, ...], ...] = ()
    timeout: float = math.inf  # seconds from its start after which a response is cut off, not empty: "timeout"

    def __post_init__(self) -> None:
        for name in ("temperature", "max_tokens", "samples", "timeout"):
            if not getattr(self, name) > 0:
                raise UserError(f"sampling {name} is {getattr(self, name)}: it must be above 0")


@dataclass(frozen=True)
class Request:
    """Prompts that are handed to an engine together."""

    prompts: list[list[int]]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """One response. ``prompt`` is the index into the request, ``sample`` in [0, samples)."""

    prompt: int
    sample: int
    tokens: np.ndarray  # [n] int32, stop token included; n = 0 only when interrupted
    logprobs: np.ndarray  # [n] float32, nats, of the distribution that was sampled: temperature applied
    finish_reason: str  # "stop" | "length" | "timeout" | "interrupted"
    # [prompt + n - 1, layers, top_k] of `expert_type`, where the engine records them: of all tokens, those of
    # `prefixes` too, but the last, which went through no layer; -1: not known
    routed_experts: np.ndarray | None
    policy_version: int


def expert_type(experts: int) -> np.dtype[Any]:
    """The smallest signed integer type for the ids of so many experts and -1."""
    return np.min_scalar_type(-experts)


def never() -> bool:
    """The `interrupted` of a generation that runs to its end."""
    return False


class RolloutEngine(Protocol):
    """What a rollout phase needs: one replica, with the weights of one policy.

    repeats_chunks: whether the same request always gives the same bytes, so that a resumed phase has to repeat whole
    requests. Where requests are decoded together, whatever else is in the batch changes the last bits, and only the
    groups that are missing are generated again.
    """

    repeats_chunks: bool
    precision: str  # "float32" | "bfloat16"

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish, in any order. A request that cannot be served is a `UserError` at once."""

    def serve(
        self, requests: Iterator[Request], interrupted: Callable[[], bool] = never
    ) -> Iterator[tuple[int, Completion]]:
        """(number of the request, counted from 0 in the order in which they were taken; completion), in any order.

        The engine takes the next request when it has room for it, and not before. When ``interrupted()`` turns true
        it takes no more, and all that is unfinished comes out at once with what there is of it and the finish reason
        "interrupted". A request that cannot be served is a `UserError` when it is taken.
        """

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of all but the first token of each sequence, [n - 1] float32."""

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """Take the Hugging Face export in ``policy_dir``; later completions carry ``version``. Also ends a `sleep`.

        In place where that gives what a fresh engine would, else by making one.
        """

    def sleep(self) -> None:
        """Give back the memory of weights and caches."""

    def wake(self) -> None:
        """Be ready to generate again, with the weights that were loaded last."""

    def close(self) -> None:
        """Release everything; the engine is not used again."""


def response_seed(run_seed: int, group_id: int, sample: int) -> int:
    """The seed of one response, in [0, 2**64): the same on every machine, Python version and batch composition."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}/{sample}".encode(), digest_size=8, person=b"megarl")
    return int.from_bytes(digest.digest(), "little")


def continuation_seed(seed: int, done: int) -> int:
    """The seed with which an engine that seeds requests continues a response after ``done`` tokens; 0: its own."""
    if not done:
        return seed
    digest = hashlib.blake2b(f"{seed}/{done}".encode(), digest_size=8, person=b"megarl")
    return int.from_bytes(digest.digest(), "little")


def check_request(prompts: Sequence[Sequence[int]], sampling: Sampling, vocabulary: int, context: int) -> None:
    """Refuse what an engine cannot serve, naming the prompt: empty, out of vocabulary, too long, wrong number of seeds.

    ``context`` is the largest number of positions of the engine, in tokens.
    """
    if len(sampling.seeds) != len(prompts) * sampling.samples:
        raise UserError(
            f"{len(prompts)} prompts with {sampling.samples} samples each need "
            f"{len(prompts) * sampling.samples} seeds, got {len(sampling.seeds)}"
        )
    if sampling.prefixes:
        _check_prefixes(sampling, vocabulary)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} is empty: at least one token is needed")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocabulary:
                raise UserError(
                    f"prompt {index} has token {token}, outside the model's vocabulary [0, {vocabulary}): "
                    "does the tokenizer belong to the model?"
                )
        if len(prompt) + sampling.max_tokens > context:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens; with {sampling.max_tokens} response tokens that exceeds the "
                f"engine's {context} positions (max_position_embeddings, or the longest that the recipe allows): "
                "shorten the prompts or lower max_response_tokens"
            )


def _check_prefixes(sampling: Sampling, vocabulary: int) -> None:
    if len(sampling.prefixes) != len(sampling.seeds):
        raise UserError(f"{len(sampling.seeds)} responses need as many prefixes, got {len(sampling.prefixes)}")
    for index, prefix in enumerate(sampling.prefixes):
        if len(prefix) >= sampling.max_tokens:
            raise UserError(
                f"the prefix of response {index} has {len(prefix)} tokens: nothing is left of {sampling.max_tokens}"
            )
        if prefix and not 0 <= min(prefix) <= max(prefix) < vocabulary:
            raise UserError(f"the prefix of response {index} has a token outside the vocabulary [0, {vocabulary})")
