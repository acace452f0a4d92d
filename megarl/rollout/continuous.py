"""What engines share that decode the responses of many requests together: vLLM and SGLang.

Each response is a request of its own to such an engine, which takes the next as soon as one has ended. What else is in
the batch changes the last bits of a response's log-probs and so, now and then, its tokens: the same seeds do not
promise the same bytes.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import Completion, Request, Sampling, expert_type, never, section

CHANCE = 256  # as many tokens and layers do not go to the same of several experts by chance


@dataclass(frozen=True)
class Settings:
    """What a replica may use, in tokens, responses and GPUs."""

    device: str  # "cpu" | "cuda"
    context: int  # tokens of the longest prompt with its response
    responses: int  # decoded together
    memory_fraction: float | None = None  # of a GPU; None: the engine's own default
    tensor_parallel: int = 1  # GPUs
    float32_head: bool = True  # logits are not rounded to the precision of the weights
    routed_experts: bool = False  # record them; only for a model with experts
    options: Mapping[str, Any] = field(default_factory=dict)  # the engine's own, from its table in the recipe

    @classmethod
    def of(cls, recipe: Recipe, stage: int, **more: Any) -> Self:
        """Of a stage's engine; ``more``: what the recipe's tables do not say."""
        table = recipe.rollout_of(stage)
        return cls(
            device=recipe.actor.backend,
            context=recipe.longest,
            responses=table.groups_per_chunk * table.responses_per_prompt,
            memory_fraction=table.memory_fraction,
            tensor_parallel=table.tensor_parallel,
            float32_head=table.float32_head,
            options=getattr(table, table.engine),
            **more,
        )


def check_table(recipe: Recipe, stage: int, temperatures: tuple[float, float]) -> None:
    """`UserError` for GPUs on a CPU, or a temperature outside ``temperatures``, the engine's lowest and highest."""
    table = recipe.rollout_of(stage)
    if recipe.actor.backend == "cpu" and table.tensor_parallel > 1:
        raise UserError(
            f"{section(recipe, stage)} tensor_parallel = {table.tensor_parallel} is for GPUs; "
            'backend = "cpu" has one replica'
        )
    low, high = temperatures
    evaluated = [(suite.place, suite.temperature) for suite in recipe.suites if suite.temperature]  # 0: greedy
    for place, value in (("[rollout]", table.temperature), *evaluated):
        if not low <= value <= high:
            raise UserError(f"{place} temperature = {value}: {table.engine} samples at {low} to {high}")


def out_of_memory(engine: str, doing: str, cause: str, settings: Settings, share: str, remedy: str) -> UserError:
    """The error for a replica that ran out of memory, with the settings that a person can change.

    share: what ``memory_fraction`` is a share of; remedy: how else than by lowering a limit it may be answered.
    """
    fraction = "(not set)" if settings.memory_fraction is None else f"= {settings.memory_fraction}"
    return UserError(
        f"{engine} ran out of memory while {doing}: {cause}. [rollout] memory_fraction {fraction} is "
        f"{share}; groups_per_chunk * responses_per_prompt = {settings.responses} responses decode together, each of "
        f"up to data.max_prompt_tokens + max_response_tokens = {settings.context} tokens: lower one of these, or "
        f"{remedy}"
    )


def checked_experts(found: np.ndarray | None, length: int, hf: dict[str, Any], cut_off: bool) -> np.ndarray:
    """[length, layers, top_k] of `expert_type`, from what an engine recorded of all tokens of a response but the last.

    cut_off: the response was ended early and its record may lack its end, where ids then are -1: not known.
    RuntimeError for a record of another shape and for ids that no router gives: outside the model's, one twice for a
    token (an empty record is 0 throughout), or the same one everywhere.
    """
    shape = length, hf["num_hidden_layers"], hf["num_experts_per_tok"]
    found = np.empty((0, *shape[1:]), np.int32) if found is None else found[:length]
    if found.shape[1:] != shape[1:] or (len(found) < length and not cut_off):
        raise RuntimeError(f"the engine recorded experts of the shape {found.shape}, not {shape}")
    if found.size and not 0 <= found.min() <= found.max() < hf["num_experts"]:
        raise RuntimeError(
            f"the engine recorded experts {found.min()} to {found.max()}; the model has {hf['num_experts']}"
        )
    ordered = np.sort(found, axis=-1)
    twice = bool((ordered[..., 1:] == ordered[..., :-1]).any())
    if twice or (found.size > CHANCE and hf["num_experts"] > 1 and found.min() == found.max()):
        raise RuntimeError("the engine recorded one expert twice for a token, or no other one: it is not filled")
    result = np.full(shape, -1, expert_type(hf["num_experts"]))
    result[: len(found)] = found
    return result


@dataclass
class Running:
    """A response that the engine is working on."""

    request: int  # number of its request
    prompt: int  # as in `Completion`
    sample: int
    tokens: list[int]  # that it continues: the prompt, and the prefix if there is one
    seed: int
    done: int  # tokens of the prefix
    limit: int  # tokens that may still follow
    timeout: float  # seconds
    deadline: float = math.inf  # monotonic seconds; not counted before it begins and once it has been told to end
    cut_off: str | None = None  # the finish reason, once it has been told to end before its time

    def begin(self) -> None:
        """Its time starts to count."""
        if self.cut_off is None:
            self.deadline = time.monotonic() + self.timeout

    def end(self, why: str) -> None:
        """It has been told to end before its time, for this reason if it had not been before."""
        self.cut_off, self.deadline = self.cut_off or why, math.inf


class ContinuousEngine(ABC):
    """The part of a `RolloutEngine` that decides which responses run: submission, time limits, interruption.

    An engine that derives from it says how responses are handed over, decoded and ended early. Weights are computed
    with in float32 on a CPU and in bfloat16 on a GPU, unless its options quantise them.
    """

    repeats_chunks = False

    def __init__(self, policy_dir: Path, version: int, settings: Settings) -> None:
        self.settings, self.policy_dir, self.version = settings, Path(policy_dir), version
        self.precision = "float32" if settings.device == "cpu" else "bfloat16"
        if "quantization" in settings.options:
            self.precision = "quantised"
        self.cache_tokens = math.inf  # that the engine's cache holds; known once it has started
        self._done = self._done_tokens = 0  # responses, and their lengths with the prompts
        # Unique for the engine's lifetime, and none is the beginning of another: SGLang aborts all names that begin
        # with the given one, and does it once more two seconds after it has answered.
        self._names = (f"{number}/" for number in itertools.count())

    def serve(
        self, requests: Iterator[Request | None], interrupted: Callable[[], bool] = never
    ) -> Iterator[tuple[int, Completion]]:
        """The next request is taken when fewer responses run than there is room for, though others have not ended."""
        number, more = 0, True
        running: dict[str, Running] = {}
        self._begin()
        try:
            while more or running:
                while more and self._has_room(running) and not interrupted():
                    following: Request | Literal["end"] | None = next(requests, "end")
                    if following == "end":
                        more = False
                    elif following is None:
                        break
                    else:
                        running |= self._submit(number, following)
                        number += 1
                if interrupted():
                    yield from self._cut_off(list(running), running, "interrupted")
                    return
                if running:
                    yield from self._step(running)
                    now = time.monotonic()
                    late = [name for name, response in running.items() if response.deadline < now]
                    yield from self._cut_off(late, running, "timeout")
        finally:
            if running:  # an error, or the caller takes no more
                self._abandon(running)

    def _has_room(self, running: Mapping[str, Running]) -> bool:
        """For another request: by the recipe, and in the cache.

        A response is counted with the mean length so far, where those that run count with the full one: short ones end
        first. An engine that has taken more than its cache holds throws responses out, and computes them again.
        """
        if len(running) >= self.settings.responses:
            return False
        lengths = self._done_tokens + len(running) * self.settings.context
        return not running or (len(running) + 1) * lengths <= self.cache_tokens * (self._done + len(running))

    def _submit(self, number: int, request: Request) -> dict[str, Running]:
        self._check(request)
        sampling, submitted = request.sampling, {}
        for index, (seed, limit) in enumerate(zip(sampling.seeds, sampling.limits, strict=True)):
            prompt, sample = divmod(index, sampling.samples)
            prefix = sampling.prefixes[index] if sampling.prefixes else ()
            submitted[next(self._names)] = Running(
                request=number,
                prompt=prompt,
                sample=sample,
                tokens=[*request.prompts[prompt], *prefix],
                seed=seed,
                done=len(prefix),
                limit=limit - len(prefix),
                timeout=sampling.timeout,
            )
        self._send(submitted, sampling)
        return submitted

    def _completion(
        self,
        response: Running,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        finish_reason: str,
        routed_experts: np.ndarray | None = None,
    ) -> tuple[int, Completion]:
        """What `serve` hands out of a response, from tokens [n] and log-probs [n]."""
        if finish_reason != "interrupted":
            self._done, self._done_tokens = self._done + 1, self._done_tokens + len(response.tokens) + len(tokens)
        return response.request, Completion(
            prompt=response.prompt,
            sample=response.sample,
            tokens=tokens.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            finish_reason=finish_reason,
            routed_experts=routed_experts,
            policy_version=self.version,
        )

    def _begin(self) -> None:  # noqa: B027 - most engines have nothing to prepare
        """Called at the start of every `serve`."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """`UserError` for a request that the engine cannot serve, RuntimeError if the engine sleeps."""

    @abstractmethod
    def _send(self, responses: dict[str, Running], sampling: Sampling) -> None:
        """Hand the responses of one request to the engine; each begins (`Running.begin`) now or in a `_step`."""

    @abstractmethod
    def _step(self, running: dict[str, Running]) -> Iterator[tuple[int, Completion]]:
        """Decode for a moment; remove from ``running`` the responses that have ended, and hand them out."""

    @abstractmethod
    def _cut_off(self, names: list[str], running: dict[str, Running], why: str) -> Iterator[tuple[int, Completion]]:
        """End responses early, with ``why`` as their finish reason.

        "interrupted": all that run; they are handed out here, however short they are. "timeout": these, here or by a
        later `_step`; none is handed out without a token.
        """

    @abstractmethod
    def _abandon(self, running: dict[str, Running]) -> None:
        """End what still runs when nobody waits for it any more."""
