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
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Sampling:
    """How to sample. One seed a response, prompt-major: ``seeds[prompt * samples + sample]``.

    A response's randomness comes from its seed alone, so it does not depend on what else is in the batch.

    prefixes: () or, for each response, the tokens that an earlier, interrupted request has generated of it. They count
    towards ``max_tokens``; a completion holds only the tokens that follow them.
    """

    temperature: float  # 0: the most probable token each time
    max_tokens: int  # tokens of a response, stop token included
    samples: int  # responses per prompt
    stop_token_ids: tuple[int, ...]  # any of them ends a response and is its last token
    seeds: tuple[int, ...]  # [prompts * samples], each in [0, 2**63): see `_seed`
    prefixes: tuple[tuple[int, ...], ...] = ()  # [prompts * samples]
    timeout: float = math.inf  # seconds that a response may take; then it is cut off, but with at least one token
    # tokens are drawn from the fewest most probable ones whose probability, after the temperature, is top_p or more
    top_p: float = 1.0
    budget: float = math.inf  # tokens that this request adds to a response at most; its finish reason is then "length"

    def __post_init__(self) -> None:
        for name in ("max_tokens", "samples", "timeout", "top_p", "budget"):
            if not getattr(self, name) > 0:
                raise UserError(f"sampling {name} is {getattr(self, name)}: it must be above 0")
        if not self.temperature >= 0:
            raise UserError(f"sampling temperature is {self.temperature}: it must be above 0, or 0 for greedy decoding")
        if not self.top_p <= 1:
            raise UserError(f"sampling top_p is {self.top_p}: it must be above 0 and at most 1")

    @property
    def limits(self) -> list[int]:
        """[prompts * samples], the tokens that each response may have after this request, its prefix included."""
        begun = [len(prefix) for prefix in self.prefixes] or [0] * len(self.seeds)
        return [int(min(self.max_tokens, done + self.budget)) for done in begun]


@dataclass(frozen=True)
class Request:
    """Prompts that an engine gets together, as token ids."""

    prompts: list[list[int]]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """One response. ``prompt`` is the index into the request, ``sample`` in [0, samples)."""

    prompt: int
    sample: int
    tokens: np.ndarray  # [n] int32, stop token included; n = 0 only when interrupted
    # [n] float32, nats, of the distribution that was sampled, temperature applied. With temperature 0 they are those of
    # temperature 1; whether top_p is applied depends on the engine, and no response is trained that it truncated
    logprobs: np.ndarray
    finish_reason: str  # "stop" | "length" | "timeout" | "interrupted"
    # [prompt + n - 1, layers, top_k] of `expert_type`, or None if the engine does not record them: the experts of every
    # token (prefix included) but the last, which no layer has processed; -1 where they are not known
    routed_experts: np.ndarray | None
    policy_version: int


def expert_type(experts: int) -> np.dtype[Any]:
    """The smallest signed integer type that holds expert ids below ``experts`` and -1."""
    return np.min_scalar_type(-experts)


def never() -> bool:
    """For `RolloutEngine.serve`: a generation that nothing interrupts."""
    return False


class RolloutEngine(Protocol):
    """What a rollout phase needs of an engine: one replica, with the weights of one policy.

    repeats_chunks: the same request always gives the same bytes, so a resumed phase repeats whole requests. Engines
    that decode several requests together cannot promise that; for them only the missing groups are generated again.
    """

    repeats_chunks: bool
    precision: str  # "float32" | "bfloat16" | "quantised"

    def serve(
        self, requests: Iterator[Request | None], interrupted: Callable[[], bool] = never
    ) -> Iterator[tuple[int, Completion]]:
        """Pairs (number of the request, completion) as responses end, in any order. Requests are numbered from 0.

        The engine takes the next request only when it has room for it; None instead of one says that there is none just
        now, while others are decoded. Once ``interrupted()`` is true it takes no more,
        and every unfinished response is handed out at once, as far as it got, with the finish reason "interrupted". A
        request that cannot be served is a `UserError` when it is taken.
        """

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of all but the first token of each sequence, [n - 1] float32."""

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """Load the Hugging Face export in ``policy_dir``; later completions carry ``version``. Also ends a `sleep`.

        The result is that of a newly made engine, and an engine that cannot reload in place is made anew.
        """

    def renew(self) -> bool:
        """Make the engine anew, with the weights that were loaded last; False, where it is: nothing is done then.

        For weights that were loaded in place and turn out to be wrong.
        """

    def checksum(self) -> str | None:
        """Of all weights as the engine holds them, which other weights do not have; None if it has none to offer.

        It says nothing beyond this engine and its kind: weights are fused, split and converted.
        """

    def sleep(self) -> None:
        """Free the memory of weights and caches."""

    def wake(self) -> None:
        """End a `sleep`, with the weights that were loaded last."""

    def close(self) -> None:
        """Release everything; the engine is not used again."""


class EngineModule(Protocol):
    """What the module of an engine offers; the rest of megarl knows it by its line in `megarl.recipe.names`.

    Importing the module must be cheap: the engine's own package is imported by ``build`` alone.
    """

    RECORDS_EXPERTS: frozenset[str]  # the backends, "cpu" or "cuda", on which completions can have `routed_experts`
    COLD_START: bool  # whether its process must be a new interpreter, not a fork of one that has imported torch

    def check(self, recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
        """`UserError` if the engine is not installed or cannot serve the recipe; ``hf``: from `read_hf_config`."""

    def build(self, recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool) -> RolloutEngine:
        """One replica with the policy of ``policy_dir``, which records experts if ``routed_experts``."""


def section(recipe: Recipe, stage: int) -> str:
    """The table of the recipe that an error about the engine of a stage should name."""
    return f"[stages.{stage}]" if str(stage) in recipe.stages else "[rollout]"


def response_seed(run_seed: int, group_id: int, sample: int) -> int:
    """The seed of one response: the same on every machine, Python version and batch composition."""
    return _seed(f"{run_seed}/{group_id}/{sample}")


def continuation_seed(seed: int, done: int) -> int:
    """The seed of a request that continues a response after ``done`` tokens, for engines that draw from its start on.

    With the response's own seed they would repeat the draws of its beginning.
    """
    return _seed(f"{seed}/{done}") if done else seed


def _seed(name: str) -> int:
    """In [0, 2**63). vLLM 0.32 on GPUs and SGLang 0.5.23 keep seeds as int64; vLLM takes -1 for none."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"megarl")
    return int.from_bytes(digest.digest(), "little") >> 1


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
