"""The part that vLLM and SGLang share: engines that decode the responses of many requests together.

Each response is a request of its own to such an engine, which takes the next as soon as one has ended (continuous
batching). The rest of the batch changes the last bits of a response's log-probs and so, now and then, its tokens: the
same seeds need not give the same bytes.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import Completion, Request, RolloutEngine, Sampling, awake_seconds, expert_type, section

# A record with more ids than this that all name the same expert was not filled in: chance does not route tokens so.
CHANCE = 256
# what engines, torch and Python say when memory runs out, unlike "illegal memory access"
_SHORT_OF_MEMORY = re.compile(
    r"MemoryError|out of memory|(not enough|no available|can't allocate|cannot allocate) memory|memory pool size is too"
    r" small|(less|larger) than (desired|requested|the available)[^.]* memory|exceed the desired",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Settings:
    """Limits and options of one engine replica."""

    device: str  # "cpu" | "cuda"
    context: int  # tokens of the longest prompt with its response
    responses: int  # the most responses that decode together
    memory_fraction: float | None = None  # share of a GPU's memory; None: the engine's own default
    tensor_parallel: int = 1  # GPUs of the replica
    float32_head: bool = True  # compute logits in float32 instead of the precision of the weights
    routed_experts: bool = False  # record them; only for a model with experts
    sleeps: bool = False  # on a GPU, beside trainers: gives memory back to them without a new start
    options: Mapping[str, Any] = field(default_factory=dict)  # [rollout.vllm] or [rollout.sglang] of the recipe
    python: Path = Path(sys.executable)  # the interpreter in which the engine is installed

    @staticmethod
    def of(recipe: Recipe, stage: int, routed_experts: bool = False) -> Settings:
        """The settings of a stage's engine."""
        table = recipe.rollout_of(stage)
        return Settings(
            device=recipe.actor.backend,
            context=recipe.longest,
            responses=table.groups_per_chunk * table.responses_per_prompt,
            memory_fraction=table.memory_fraction,
            tensor_parallel=table.tensor_parallel,
            float32_head=table.float32_head,
            routed_experts=routed_experts,
            sleeps=recipe.actor.backend == "cuda" and recipe.schedule.colocate,
            options=table.options(table.engine),
            python=recipe.rollout.interpreter(table.engine) or Path(sys.executable),
        )


def check_table(recipe: Recipe, stage: int, temperatures: tuple[float, float]) -> None:
    """Raise `UserError` for tensor parallelism on a CPU, or a temperature outside the engine's range ``temperatures``.

    Temperatures of evaluation suites are checked too, except 0 (greedy decoding), which every engine can do.
    """
    table = recipe.rollout_of(stage)
    if recipe.actor.backend == "cpu" and table.tensor_parallel > 1:
        raise UserError(
            f"{section(recipe, stage)} tensor_parallel = {table.tensor_parallel} is for GPUs; "
            'with [actor] backend = "cpu" it must be 1'
        )
    low, high = temperatures
    evaluated = [(suite.where, suite.temperature) for suite in recipe.suites if suite.temperature]  # 0: greedy
    for place, value in (("[rollout]", table.temperature), *evaluated):
        if not low <= value <= high:
            raise UserError(f"{place} temperature = {value}: {table.engine} samples at temperatures {low} to {high}")


@contextmanager
def memory_errors(
    doing: str, settings: Settings, kinds: tuple[type[Exception], ...], engine: str, share: str, remedy: str
) -> Iterator[None]:
    """Turn errors of these kinds that say that memory ran out into a `UserError`, which names the settings to change.

    share: explains what ``memory_fraction`` means to this engine; remedy: what helps besides lowering a limit.
    """
    try:
        yield
    except kinds as error:
        lines = [*str(error).splitlines(), type(error).__name__]
        cause = next((line.strip() for line in lines if _SHORT_OF_MEMORY.search(line)), None)
        if cause is None:
            raise
        fraction = "(not set)" if settings.memory_fraction is None else f"= {settings.memory_fraction}"
        raise UserError(
            f"{engine} ran out of memory while {doing}: {cause}. [rollout] memory_fraction {fraction} is {share}; "
            f"groups_per_chunk * responses_per_prompt = {settings.responses} responses decode together, each of up to "
            f"data.max_prompt_tokens + max_response_tokens = {settings.context} tokens: lower one of these, or {remedy}"
        ) from error


def checked_experts(found: np.ndarray | None, length: int, hf: dict[str, Any], cut_off: bool) -> np.ndarray | str:
    """An engine's record of routed experts as [length, layers, top_k] of `expert_type`, or what is wrong with it.

    found: the experts of the first ``length`` tokens of prompt and response, as recorded; None: there is no record.
    cut_off: the response was ended early, so the record may be too short; missing ids become -1 (unknown).
    Layers without experts, for which both engines return 0, get -1 as well.
    Wrong are another shape and ids that no router returns: ids the model does not have, one id twice for a token (a
    record that was never filled in is 0 throughout), or the same id everywhere.
    """
    shape = length, hf["num_hidden_layers"], hf["num_experts_per_tok"]
    found = np.empty((0, *shape[1:]), np.int32) if found is None else found[:length]
    if found.shape[1:] != shape[1:] or (len(found) < length and not cut_off):
        return f"the engine recorded experts of the shape {found.shape}, not {shape}"
    sparse = hf["sparse_layers"]
    found = found[:, sparse]
    if found.size and not 0 <= found.min() <= found.max() < hf["num_experts"]:
        return f"the engine recorded experts {found.min()} to {found.max()}; the model has {hf['num_experts']}"
    ordered = np.sort(found, axis=-1)
    twice = bool((ordered[..., 1:] == ordered[..., :-1]).any())
    if twice or (found.size > CHANCE and hf["num_experts"] > 1 and found.min() == found.max()):
        return (
            "the engine recorded one expert twice for a token, or the same expert for all tokens: its record of routed "
            "experts was not filled in"
        )
    result = np.full(shape, -1, expert_type(hf["num_experts"]))
    result[: len(found), sparse] = found
    return result


@dataclass
class Running:
    """A response that the engine has accepted and not yet finished."""

    request: int  # number of its request
    prompt: int  # as in `Completion`
    sample: int
    tokens: list[int]  # the tokens that it continues: the prompt and, if there is one, the prefix
    seed: int
    done: int  # tokens of the prefix
    limit: int  # tokens that may still follow
    timeout: float  # seconds from `begin` on
    deadline: float = math.inf  # in `awake_seconds`; inf before `begin`, and once the engine was told to end it
    cut_off: str | None = None  # the finish reason, once the engine was told to end it early

    def begin(self) -> None:
        """Start its timeout."""
        if self.cut_off is None:
            self.deadline = awake_seconds() + self.timeout

    def end(self, why: str) -> None:
        """Note that the engine was told to end it early; of several reasons the first one counts."""
        self.cut_off, self.deadline = self.cut_off or why, math.inf


class ContinuousEngine(RolloutEngine):
    """The part of a `RolloutEngine` that decides which responses run: submission, timeouts, interruption.

    A subclass defines how responses are submitted, decoded and ended early. Weights are float32 on a CPU and bfloat16
    on a GPU, unless the engine's options quantise them.
    """

    repeats_chunks = False

    def __init__(self, policy_dir: Path, version: int, settings: Settings) -> None:
        self.settings, self.policy_dir, self.version = settings, Path(policy_dir), version
        self.precision = "float32" if settings.device == "cpu" else "bfloat16"
        if "quantization" in settings.options:
            self.precision = "quantised"
        self.cache_tokens = math.inf  # capacity of the KV cache; known once the engine has started
        self._done = self._done_tokens = 0  # finished responses, and the sum of their lengths with the prompts
        # Unique for the engine's lifetime, and none is a prefix of another: SGLang aborts all responses whose names
        # begin with the given one, and does so once more two seconds after it has answered.
        self._names = (f"{number}/" for number in itertools.count())
        self._running: dict[str, Running] = {}
        self._hf: dict[str, Any] = {}  # config.json of the policy, once it is loaded

    @property
    def decoding(self) -> int:
        return len(self._running)

    def has_room(self) -> bool:
        """Whether fewer responses run than the recipe allows, and the KV cache has room.

        Each response is assumed to have the mean length so far. In this mean running responses count with the full
        length, because short ones end first. An engine whose cache is full evicts responses and recomputes them later.
        """
        running = self.decoding
        if running >= self.settings.responses:
            return False
        lengths = self._done_tokens + running * self.settings.context
        return not running or (running + 1) * lengths <= self.cache_tokens * (self._done + running)

    def step(self) -> list[tuple[int, Completion]]:
        ended = self._step()
        now = awake_seconds()
        late = [name for name, response in self._running.items() if response.deadline < now]
        return ended + self._cut_off(late, "timeout")

    def interrupt(self) -> list[tuple[int, Completion]]:
        return self._cut_off(list(self._running), "interrupted")

    def abort(self) -> None:
        if self._running:
            self._abort()
            self._running.clear()

    def submit(self, number: int, request: Request) -> None:
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
        self._running |= submitted

    def _completion(
        self,
        response: Running,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        finish_reason: str,
        record: np.ndarray | None = None,
        wrong: str | None = None,
    ) -> tuple[int, Completion]:
        """The pair that `step` returns for a response, from its tokens [n], log-probs [n] and record of experts."""
        experts: np.ndarray | str | None = None
        if self.settings.routed_experts:
            processed = len(response.tokens) + len(tokens) - 1  # no forward pass has processed the last token
            experts = checked_experts(record, processed, self._hf, cut_off=finish_reason not in ("stop", "length"))
        if finish_reason != "interrupted":
            self._done, self._done_tokens = self._done + 1, self._done_tokens + len(response.tokens) + len(tokens)
        return response.request, Completion(
            prompt=response.prompt,
            sample=response.sample,
            tokens=tokens.clip(-1, np.iinfo(np.int32).max).astype(np.int32),  # `fault` then finds what does not fit
            logprobs=logprobs.astype(np.float32),
            finish_reason=finish_reason,
            routed_experts=None if isinstance(experts, str) else experts,
            policy_version=self.version,
            wrong=wrong or (experts if isinstance(experts, str) else None),
        )

    @abstractmethod
    def _send(self, responses: dict[str, Running], sampling: Sampling) -> None:
        """Submit the responses of one request; call `Running.begin` of each here or in a later `_step`."""

    @abstractmethod
    def _step(self) -> list[tuple[int, Completion]]:
        """Decode briefly; remove the responses that have ended from ``_running`` and return them."""

    @abstractmethod
    def _cut_off(self, names: list[str], why: str) -> list[tuple[int, Completion]]:
        """End the responses ``names`` early, with ``why`` as their finish reason.

        "interrupted": ``names`` are all running responses; all are returned here, even those without a token.
        "timeout": they are returned here or by a later `_step`; each gets at least one token first.
        """

    @abstractmethod
    def _abort(self) -> None:
        """Make the engine drop the running responses; nobody waits for them any more."""
