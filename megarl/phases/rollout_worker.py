"""An engine with its verifiers: prompts go in, scored responses come out. All phases that generate use it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.prompts import PromptSource, open_prompts
from megarl.data.tokenizer import stop_token_ids
from megarl.distributed import ReplicaGroup
from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.phases.scoring import PendingGroup, ScoredGroup, Scoring, SeededPrompt
from megarl.recipe.tables import Recipe
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rollout import build_engine
from megarl.rollout.drift import Drift, check_weights, hugging_face_reference
from megarl.rollout.engine import Completion, Request, RolloutEngine, Sampling, never, response_seed
from megarl.storage.policies import decode_reference, encode_reference, read_info, read_reference
from megarl.storage.rollouts import Response
from megarl.storage.shards import UNFINISHED, any_unfinished

PROMPTS, PROMPT_TOKENS = 16, 128  # size of the reference text of a base model, which transformers scores on a CPU
CONTINUED = -1  # the chunk number of a group that an earlier call of `RolloutWorker.generate` began
_Place = tuple[PendingGroup, int]  # a response: its group and its index in the group


@dataclass(frozen=True)
class SamplingSettings:
    """How the responses to each prompt are sampled; fields as in `Sampling`."""

    samples: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    budget: float = math.inf


@dataclass
class RolloutWorker:
    """An engine with one policy, and the verifier processes that score its responses while it generates others."""

    recipe: Recipe
    tokenizer: Any
    prompts: PromptSource
    scoring: Scoring
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]
    weights_hash: str
    stopped: Callable[[], bool] = never  # once True, `generate` no longer waits for rewards; the next attempt repeats
    unfinished: list[PendingGroup] = field(default_factory=list)  # left by an interrupted `generate`
    decoding: int = 0  # responses that the engine has taken and not returned
    checksum: str | None = None  # of the engine's weights at their last check; None if the engine has no checksums
    other_checksum: str | None = None  # `checksum` of the previous policy, if the last `load` changed the weights

    @classmethod
    def build(cls, recipe: Recipe, stage: int, policy_dir: Path, for_training: bool = True) -> RolloutWorker:
        """A worker with the engine that the recipe names for ``stage``.

        for_training: record routed experts if the recipe lets the actor replay them.
        """
        beat("engine", f"start of prompts, verifiers and engine with {policy_dir.name}")
        info = read_info(policy_dir)
        tokenizer, prompts = open_prompts(recipe, policy_dir)
        # forks, so it comes before the engine starts threads or CUDA
        verifiers = VerifierPool(lambda: build_verifier(recipe, prompts), Limits.of_this_process(recipe))
        experts = for_training and recipe.actor.routing_replay == "engine"
        engine = build_engine(recipe, stage, policy_dir, info.version, routed_experts=experts)
        return cls(
            recipe=recipe,
            tokenizer=tokenizer,
            prompts=prompts,
            # repeated chunks must be stored in the same order, whichever response was scored first
            scoring=Scoring(verifiers, recipe.reward, engine.repeats_chunks, recipe.rollout.max_response_tokens),
            engine=engine,
            stop_token_ids=tuple(stop_token_ids(tokenizer, policy_dir)),
            weights_hash=info.weights_hash,
        )

    def close(self) -> None:
        """Release engine and verifiers; the worker is not used again."""
        self.scoring.close()
        self.engine.close()

    def load(self, policy_dir: Path) -> None:
        """Load another policy into the engine. The caller must then call `check_weights`."""
        beat("load", f"load of policy {policy_dir.name}")
        info = read_info(policy_dir)
        self.engine.load_weights(policy_dir, info.version)
        self.other_checksum = None if info.weights_hash == self.weights_hash else self.checksum
        self.weights_hash = info.weights_hash

    def check_weights(self, policy_dir: Path, replicas: ReplicaGroup) -> Drift:
        """Compare the engine's log-probs with those of the actor that exported its policy; call it after every load.

        If weights that were loaded in place are wrong, the engine is created anew and checked again. `UserError` if the
        weights of a new engine are wrong.
        """
        beat("check of weights", policy_dir.name)
        reference = read_reference(policy_dir)
        if reference is None:  # a base model has no exporting actor: transformers scores it, once for all replicas
            name = f"reference of {self.weights_hash}"
            text = [list(self.prompts.train(number).tokens[:PROMPT_TOKENS]) for number in range(PROMPTS)]
            reference = decode_reference(
                replicas.once(name, lambda: encode_reference(hugging_face_reference(policy_dir, text)))
            )
        try:
            drift = check_weights(self.engine, reference, self.other_checksum)
        except UserError as error:
            if not self.engine.restart():
                raise
            print(f"{error}; the engine was created anew because of that", file=sys.stderr)
            drift = check_weights(self.engine, reference, self.other_checksum)
        self.checksum = drift.checksum
        return drift

    def generate(
        self,
        chunks: Iterator[Sequence[SeededPrompt]],
        draws: SamplingSettings,
        interrupted: Callable[[], bool] = never,
        on_scored: Callable[[ScoredGroup], None] = lambda group: None,
    ) -> Iterator[ScoredGroup]:
        """Generate and score responses to the prompts of ``chunks``; yields each prompt's group once it is complete.

        A chunk is taken when the engine has room for it. Responses that are unfinished when ``interrupted`` becomes
        True are continued by the next call, before any chunk. ``on_scored`` is called with each group as soon as all of
        its rewards are known.
        """
        pending, self.unfinished = self.unfinished, []
        asked: list[tuple[int, list[_Place]]] = []  # for each request: responses per prompt, and all its responses
        self.scoring.on_scored, samples = on_scored, draws.samples

        def ask(groups: Sequence[PendingGroup], continues: bool) -> Request:
            places = [(g, k) for g in groups for k in range(samples) if k not in g.responses and k not in g.ended]
            asked.append((1 if continues else samples, places))
            self.decoding += len(places)
            return self._continuation(places, draws) if continues else self._request(groups, draws)

        def requests() -> Iterator[Request]:
            if pending:
                yield ask(pending, continues=True)
            for number, chunk in enumerate(chunks):
                beat("chunk", f"chunk {number + 1} of this replica, prompt {chunk[0].number}")
                groups = [_pending(number, seeded, samples) for seeded in chunk]
                pending.extend(groups)
                yield ask(groups, continues=any(seeded.earlier for seeded in chunk))

        def stopped() -> bool:
            self.scoring.poll()
            return interrupted()

        for number, completion in self.engine.serve(requests(), never if interrupted is never else stopped):
            self.decoding -= 1
            each, places = asked[number]
            group, k = places[completion.prompt * each + completion.sample]
            group.parts.setdefault(k, []).append(completion)
            if completion.finish_reason == "interrupted":
                continue
            self._score(group, k, group.parts.pop(k), draws)
            if self.scoring.is_due():
                yield from self.scoring.take()
        for _ in self.scoring.waiting(unless=self.stopped):
            yield from self.scoring.take()
        self.unfinished = [group for group in pending if not group.done]
        for group in self.unfinished:
            group.chunk = CONTINUED

    def _request(self, groups: Sequence[PendingGroup], draws: SamplingSettings) -> Request:
        seeds = [self._seed(group.seeded, k) for group in groups for k in range(draws.samples)]
        return Request([list(group.seeded.prompt.tokens) for group in groups], self._sampling(draws, seeds))

    def _continuation(self, places: Sequence[_Place], draws: SamplingSettings) -> Request:
        """A request that continues responses: it repeats the prompt for each response, with the response's prefix."""
        seeds = [self._seed(group.seeded, k) for group, k in places]
        parts = [group.parts.get(k, ()) for group, k in places]
        prefixes = tuple(tuple(token for part in found for token in part.tokens.tolist()) for found in parts)
        sampling = replace(self._sampling(draws, seeds), samples=1, prefixes=prefixes)
        return Request([list(group.seeded.prompt.tokens) for group, _ in places], sampling)

    def _sampling(self, draws: SamplingSettings, seeds: Sequence[int]) -> Sampling:
        return Sampling(
            temperature=draws.temperature,
            max_tokens=draws.max_tokens,
            samples=draws.samples,
            stop_token_ids=self.stop_token_ids,
            seeds=tuple(seeds),
            timeout=self.recipe.rollout.response_timeout,
            top_p=draws.top_p,
            budget=draws.budget,
        )

    def _seed(self, seeded: SeededPrompt, sample: int) -> int:
        return response_seed(self.recipe.run.seed, seeded.number, sample)

    def _score(self, group: PendingGroup, sample: int, parts: Sequence[Completion], draws: SamplingSettings) -> None:
        """Have a response scored. parts: its spans of tokens, each sampled by one policy.

        Where responses may stay unfinished, those of a group are scored only once all have ended.
        """
        response = _joined(parts, draws.max_tokens)
        if draws.budget == math.inf and not group.seeded.earlier:
            self.scoring.add(group, sample, response, self._text(response))
            return
        group.ended[sample] = response
        if len(group.ended) < group.samples:
            return
        if any_unfinished(group.ended.values()):
            self.scoring.add_unscored(group)
            return
        for number in range(group.samples):
            response = group.ended.pop(number)
            self.scoring.add(group, number, response, self._text(response))

    def _text(self, response: Response) -> str:
        text: str = self.tokenizer.decode(response.tokens, skip_special_tokens=True)
        return text


def _pending(chunk: int, seeded: SeededPrompt, samples: int) -> PendingGroup:
    """A group to generate, with the responses, or parts of them, that an earlier stage generated."""
    group = PendingGroup(chunk, seeded, samples)
    for sample, response in enumerate(seeded.earlier):
        if response.finish_reason == UNFINISHED:
            group.parts[sample] = _spans(response, len(seeded.prompt.tokens))
        else:
            group.ended[sample] = response
    return group


def _spans(response: Response, prompt: int) -> list[Completion]:
    """The inverse of `_joined`: a response split where its policy changes. prompt: number of tokens of the prompt."""
    versions, experts = response.versions, response.routed_experts
    ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        Completion(
            prompt=0,
            sample=0,
            tokens=response.tokens[start:end],
            logprobs=response.rollout_logprobs[start:end],
            finish_reason="interrupted",
            routed_experts=None if experts is None else experts[: prompt + end - 1],
            policy_version=int(versions[start]),
        )
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _joined(parts: Sequence[Completion], max_tokens: int) -> Response:
    """The spans of a response joined, without a reward. It is unfinished if it was cut off before ``max_tokens``."""
    if len(parts) == 1:
        tokens, logprobs, versions = parts[0].tokens, parts[0].logprobs, None
    else:
        tokens, logprobs = (np.concatenate(x) for x in ([p.tokens for p in parts], [p.logprobs for p in parts]))
        versions = np.concatenate([np.full(len(part.tokens), part.policy_version, np.int32) for part in parts])
    cut = parts[-1].finish_reason == "length" and len(tokens) < max_tokens
    return Response(
        tokens=np.asarray(tokens, np.int32),
        rollout_logprobs=np.asarray(logprobs, np.float32),
        reward=0.0,
        finish_reason=UNFINISHED if cut else parts[-1].finish_reason,
        policy_version=parts[0].policy_version if versions is None else int(versions[0]),
        policy_versions=None if versions is None or (versions == versions[0]).all() else versions,
        routed_experts=join_experts(parts),
    )


def join_experts(parts: Sequence[Completion]) -> np.ndarray | None:
    """The experts that each token was routed to when it was sampled; None if the engine does not record them.

    A continuation recomputes the tokens before it with its own policy, so perhaps with other experts. For these tokens
    the first record is kept, since the stored log-probs belong to it.
    """
    joined: list[np.ndarray] = []
    for part in parts:
        if part.routed_experts is None:
            return None
        if len(part.tokens):
            joined.append(part.routed_experts[sum(map(len, joined)) :])
    return np.concatenate(joined)
