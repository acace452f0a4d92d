"""The contract of all rollout engines: prompts in, completions with the log-probs of the sampled distribution out."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.recipe.tables import Recipe
from megarl.storage.shards import FINISH_REASONS, LOGPROB_TOLERANCE, UNFINISHED

LONGEST_STEP = 60.0  # seconds between two readings of `awake_seconds` that count, at most
MOST_DISCARDED = 3  # faulty attempts at one response, or turn, after which the engine itself must be at fault


class EngineFault(Exception):
    """An engine returned what no working engine returns.

    Nobody can correct that in a recipe, so it is no `UserError`: the phase fails and is started again, perhaps on
    another machine.
    """


class _Awake:
    seconds, read = 0.0, time.monotonic()


def awake_seconds() -> float:
    """The clock for timeouts of responses, which engines read at every step. The time for which this process was
    suspended, as by ``scontrol suspend``, does not count."""
    now = time.monotonic()
    _Awake.seconds, _Awake.read = _Awake.seconds + min(now - _Awake.read, LONGEST_STEP), now
    return _Awake.seconds


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. Each response has its own seed: ``seeds[prompt * samples + sample]``.

    A response's randomness comes from its seed alone, so it does not depend on what else is in the batch.

    prefixes: () or, for each response, the tokens that an earlier, interrupted request already generated; the engine
    continues after them. They count towards ``max_tokens``, but a completion holds only the tokens after the prefix.
    """

    temperature: float  # 0: greedy decoding
    max_tokens: int  # longest response in tokens, prefix and stop token included
    samples: int  # responses per prompt
    stop_token_ids: tuple[int, ...]  # any of them ends a response and is its last token
    seeds: tuple[int, ...]  # [prompts * samples], each in [0, 2**63): see `_seed`
    prefixes: tuple[tuple[int, ...], ...] = ()  # [prompts * samples]
    timeout: float = math.inf  # seconds that a response may take; then it is cut off, but with at least one token
    # nucleus sampling: the smallest set of most probable tokens with total probability (at the temperature) >= top_p
    top_p: float = 1.0
    # the most tokens that this request may add to a response; one cut off by it also has the finish reason "length"
    budget: float = math.inf

    @property
    def limits(self) -> list[int]:
        """[prompts * samples] tokens: the longest each response may be after this request, its prefix included."""
        prefix_lengths = [len(prefix) for prefix in self.prefixes] or [0] * len(self.seeds)
        return [int(min(self.max_tokens, length + self.budget)) for length in prefix_lengths]


@dataclass(frozen=True)
class Request:
    """Prompts, as token ids, that are submitted to an engine together, and how to sample their responses."""

    prompts: list[list[int]]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """One response: number ``sample``, in [0, samples), to the request's prompt with index ``prompt``."""

    prompt: int
    sample: int
    tokens: np.ndarray  # [n] int32, stop token included; n = 0 only when interrupted
    # [n] float32, nats, of the sampled distribution, that is after the temperature. At temperature 0 they are those of
    # temperature 1. Whether top_p is applied depends on the engine; no response sampled with top_p < 1 is trained on
    logprobs: np.ndarray
    finish_reason: str  # "stop" | "length" | "timeout" | "interrupted"
    # [prompt + prefix + n - 1, layers, top_k] of `expert_type`: the experts of each token of prompt, prefix and
    # response but the last, which no layer has processed; -1 where unknown. None if the engine does not record them
    routed_experts: np.ndarray | None
    policy_version: int
    wrong: str | None = None  # what is wrong with it, if the engine's own module has found something


def fault(completion: Completion, most: int, vocabulary: int) -> str | None:
    """What a working engine would not have returned in a completion; None if there is nothing.

    most: tokens that the completion may have. vocabulary: the model's number of tokens.
    """
    tokens, logprobs, reason = completion.tokens, completion.logprobs, completion.finish_reason
    if completion.wrong:
        return completion.wrong
    if reason not in (*FINISH_REASONS, "interrupted") or reason == UNFINISHED:
        return f"the finish reason is {reason!r}"
    if not (tokens.shape == logprobs.shape == (len(tokens),)) or (not len(tokens) and reason != "interrupted"):
        return f"{len(tokens)} tokens with {len(logprobs)} log-probs"
    if tokens.dtype != np.int32 or logprobs.dtype != np.float32:
        return f"tokens are {tokens.dtype} and log-probs {logprobs.dtype}"
    if len(tokens) > most:
        return f"{len(tokens)} tokens are more than the {most} that were asked for"
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocabulary:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
        return f"token {wrong[0]} is outside the vocabulary [0, {vocabulary})"
    if logprobs.min(initial=0) > -math.inf and logprobs.max(initial=0) <= LOGPROB_TOLERANCE:
        return None
    right = np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)
    return f"the log-prob {logprobs[~right][0]} of a token is not a finite number <= 0"


def discard(why: str, where: str, discarded: int) -> int:
    """Say that a completion was thrown away because of ``why``; returns ``discarded``, the number so far, plus 1.

    Raises `EngineFault` after `MOST_DISCARDED` of one response.
    """
    if discarded == MOST_DISCARDED:
        raise EngineFault(f"the engine returned {where} wrongly {discarded + 1} times, the last time because {why}")
    print(f"{where} is generated again with another seed, because {why}", file=sys.stderr, flush=True)
    return discarded + 1


def expert_type(experts: int) -> np.dtype[Any]:
    """The smallest signed integer type that holds the expert ids [0, experts) and -1."""
    return np.min_scalar_type(-experts)


class RolloutEngine(Protocol):
    """One engine replica, with the weights of one policy, as a rollout phase uses it: submit, step, submit ...

    Engines derive from it. Methods with a body are for engines of which a restart would change no weights.
    repeats_chunks: whether the same request always gives the same bytes. If so, a resumed phase repeats whole requests.
    Engines that decode several requests together cannot promise it; for them only the missing groups are regenerated.
    """

    repeats_chunks: bool
    precision: str  # "float32" | "bfloat16" | "quantised"

    @property
    def decoding(self) -> int:
        """The number of responses that were submitted and not returned yet."""

    @property
    def decoding_tokens(self) -> int:
        """Tokens sampled for these responses so far; 0 if the engine tells of a response only when it ends."""
        return 0

    def has_room(self) -> bool:
        """Whether another request should be submitted now; always true of an engine that is not decoding."""

    def submit(self, number: int, request: Request) -> None:
        """Begin a request, which `step` refers to by ``number``. It fits: see `megarl.data.prompts.check_data`."""

    def step(self) -> list[tuple[int, Completion]]:
        """Decode for a short while; returns (number of the request, completion) of the responses that ended in it."""

    def interrupt(self) -> list[tuple[int, Completion]]:
        """End all unfinished responses and return them as far as they got, with the finish reason "interrupted"."""

    def abort(self) -> None:
        """Drop all unfinished responses, also after an error. Does nothing if there are none."""

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """For each sequence of n tokens, [n - 1] float32: log-probs at temperature 1 of all tokens but the first."""

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """Load the Hugging Face export in ``policy_dir``; later completions carry ``version``. Ends a `sleep`.

        The engine then behaves like a newly started one; an engine that cannot reload in place is restarted.
        """

    def restart(self) -> bool:
        """Restart the engine with the weights loaded last, after weights loaded in place turned out to be wrong.

        Returns False, and does nothing, if a restart could not change the weights.
        """
        return False

    def checksum(self) -> str | None:
        """A checksum of all weights as the engine holds them; None if the engine offers none.

        Comparable only between engines of the same kind and configuration: they fuse, split and convert weights.
        """
        return None

    def sleep(self) -> None:
        """Free the memory of weights and caches until `load_weights` is called."""

    def close(self) -> None:
        """Release all resources; the engine cannot be used afterwards."""
        self.sleep()


class EngineModule(Protocol):
    """The interface of an engine's module, which `ENGINES` in `megarl.recipe.names` maps to the engine's name.

    Importing the module must be cheap: only ``build`` may import the engine's own package.
    """

    RECORDS_EXPERTS: frozenset[str]  # backends, "cpu" or "cuda", on which the engine can fill `routed_experts`
    NEW_INTERPRETER: bool  # whether its process must not be a fork of one that has imported torch

    def check(self, recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
        """Raise `UserError` if the engine is not installed or cannot serve the recipe; ``hf``: see `check_engine`."""

    def build(self, recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool) -> RolloutEngine:
        """Start one replica with the policy of ``policy_dir``; it records experts if ``routed_experts``."""


def answers(engine: RolloutEngine, request: Request) -> list[Completion]:
    """All responses to one request, in the order in which they end."""
    completions: list[Completion] = []
    try:
        engine.submit(0, request)
        while engine.decoding:
            completions += [completion for _, completion in engine.step()]
    finally:
        engine.abort()
    return completions


def section(recipe: Recipe, stage: int) -> str:
    """The recipe table, ``[stages.N]`` or ``[rollout]``, that an error about the engine of a stage should name."""
    return f"[stages.{stage}]" if str(stage) in recipe.stages else "[rollout]"


def response_seed(run_seed: int, group_id: int, sample: int) -> int:
    """The seed of one response. It does not depend on the machine, the Python version or the batch."""
    return _seed(f"{run_seed}/{group_id}/{sample}")


def continuation_seed(seed: int, done: int) -> int:
    """The seed of a request that continues a response after ``done`` tokens.

    It is for engines that restart their random stream with each request: with the response's own ``seed`` they would
    repeat the random numbers of its first tokens.
    """
    return _seed(f"{seed}/{done}") if done else seed


def next_seed(seed: int, discarded: int) -> int:
    """The seed of a response of which ``discarded`` faulty attempts were thrown away."""
    return _seed(f"{seed}/again/{discarded}") if discarded else seed


def _seed(name: str) -> int:
    """A hash of ``name`` in [0, 2**63): vLLM 0.32 on GPUs and SGLang 0.5.23 keep int64 seeds; -1 means none to vLLM."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"megarl")
    return int.from_bytes(digest.digest(), "little") >> 1


def visible_gpus(first: int, count: int) -> str:
    """``count`` consecutive GPUs of those that this process sees, starting with number ``first`` (from 0)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return ",".join(visible.split(",")[first : first + count])
    return ",".join(map(str, range(first, first + count)))


def replica_gpus(count: int) -> str:
    """The ``count`` GPUs of this process' engine replica: a node's GPUs go to its replicas in order of LOCAL_RANK."""
    return visible_gpus(int(os.environ.get("LOCAL_RANK", "0")) * count, count)
