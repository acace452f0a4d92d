"""Prompts in, scored responses out: what the rollout and the evaluate phase share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.beats import beat
from megarl.data.prompts import PromptSource, open_prompts
from megarl.data.tokenizer import stop_token_ids
from megarl.distributed import ReplicaGroup
from megarl.errors import UserError
from megarl.phases.scoring import PendingGroup, ScoredGroup, Scoring, SeededPrompt
from megarl.recipe.tables import Recipe
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rollout import build_engine
from megarl.rollout.drift import Drift, check_weights, hugging_face_reference
from megarl.rollout.engine import Completion, Request, RolloutEngine, Sampling, never, response_seed
from megarl.storage.policies import read_info
from megarl.storage.reference_logprobs import decode_reference, encode_reference, read_reference
from megarl.storage.rollouts import Response
from megarl.storage.shards import UNFINISHED, any_unfinished

PROMPTS, PROMPT_TOKENS = 16, 128  # that a base model scores, on a CPU
CONTINUED = -1  # the chunk of a group that an earlier call began
_Place = tuple[PendingGroup, int]  # a response: its group and its number there


@dataclass(frozen=True)
class Draws:
    """How the responses to a prompt are sampled, as in `Sampling`."""

    samples: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    budget: float = math.inf


@dataclass
class RolloutWorker:
    """An engine with one policy, and the processes that score its responses meanwhile."""

    recipe: Recipe
    tokenizer: Any
    prompts: PromptSource
    scoring: Scoring
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]
    weights_hash: str
    stopped: Callable[[], bool] = never  # then what has no reward yet is left to the next attempt
    unfinished: list[PendingGroup] = field(default_factory=list)
    decoding: int = 0  # responses that the engine has taken and not handed out
    checksum: str | None = None  # of the engine's weights when they were checked last, where it offers one
    other_checksum: str | None = None  # of the weights of another policy that the engine had before its last load

    @classmethod
    def build(cls, recipe: Recipe, stage: int, policy_dir: Path, for_training: bool = True) -> RolloutWorker:
        """With the engine of ``stage``, which for training records what the recipe lets the actor replay."""
        beat("engine", f"prompts, verifiers and engine with {policy_dir.name}")
        info = read_info(policy_dir)
        tokenizer, prompts = open_prompts(recipe, policy_dir)
        # before the engine starts threads or CUDA
        verifiers = VerifierPool(lambda: build_verifier(recipe, prompts), Limits.of_this_process(recipe))
        experts = for_training and recipe.actor.routing_replay == "engine"
        engine = build_engine(recipe, stage, policy_dir, info.version, routed_experts=experts)
        return cls(
            recipe=recipe,
            tokenizer=tokenizer,
            prompts=prompts,
            # chunks that can be repeated are to be stored in the same order, whichever response was scored first
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
        """Generate with another policy from here on."""
        beat("load", f"policy {policy_dir.name}")
        info = read_info(policy_dir)
        self.engine.load_weights(policy_dir, info.version)
        self.other_checksum = None if info.weights_hash == self.weights_hash else self.checksum
        self.weights_hash = info.weights_hash

    def check_weights(self, policy_dir: Path, replicas: ReplicaGroup) -> Drift:
        """Compare the engine with the actor that exported its policy; to be called after every load.

        Weights that were loaded in place and are wrong are loaded by a new engine. `UserError` if it has wrong ones.
        """
        beat("check of weights", policy_dir.name)
        reference = read_reference(policy_dir)
        if reference is None:  # a base model, which is its own reference: computed once for all replicas
            name = f"reference of {self.weights_hash}"
            text = [list(self.prompts.train(number).tokens[:PROMPT_TOKENS]) for number in range(PROMPTS)]
            reference = decode_reference(
                replicas.once(name, lambda: encode_reference(hugging_face_reference(policy_dir, text)))
            )
        try:
            drift = check_weights(self.engine, reference, self.other_checksum)
        except UserError as error:
            if not self.engine.renew():
                raise
            print(f"{error}; so the engine was made anew", file=sys.stderr)
            drift = check_weights(self.engine, reference, self.other_checksum)
        self.checksum = drift.checksum
        return drift

    def generate(
        self,
        chunks: Iterator[Sequence[SeededPrompt]],
        draws: Draws,
        interrupted: Callable[[], bool] = never,
        seen: Callable[[ScoredGroup], None] = lambda group: None,
    ) -> Iterator[ScoredGroup]:
        """The scored responses to each prompt; a prompt's group is handed out once it is complete.

        A chunk is taken when the engine has room for it. What ``interrupted`` leaves unfinished is continued by the
        next call, before any chunk. ``seen`` is called with each group as soon as all its rewards are known.
        """
        pending, self.unfinished = self.unfinished, []
        asked: list[tuple[int, list[_Place]]] = []  # of each request: responses a prompt, and whose they are
        self.scoring.seen, samples = seen, draws.samples

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
                begun = [_pending(number, seeded, samples) for seeded in chunk]
                pending.extend(begun)
                yield ask(begun, continues=any(seeded.begun for seeded in chunk))

        def stopped() -> bool:
            self.scoring.look()
            return interrupted()

        for number, completion in self.engine.serve(requests(), never if interrupted is never else stopped):
            self.decoding -= 1
            each, places = asked[number]
            group, k = places[completion.prompt * each + completion.sample]
            group.parts.setdefault(k, []).append(completion)
            if completion.finish_reason == "interrupted":
                continue
            self._have_scored(group, k, group.parts.pop(k), draws)
            if self.scoring.is_due():
                yield from self.scoring.take()
        for _ in self.scoring.settling(unless=self.stopped):
            yield from self.scoring.take()
        self.unfinished = [group for group in pending if not group.done]
        for group in self.unfinished:
            group.chunk = CONTINUED

    def _request(self, groups: Sequence[PendingGroup], draws: Draws) -> Request:
        seeds = [self._seed(group.seeded, k) for group in groups for k in range(draws.samples)]
        return Request([list(group.seeded.prompt.tokens) for group in groups], self._sampling(draws, seeds))

    def _continuation(self, places: Sequence[_Place], draws: Draws) -> Request:
        """One request with a prompt of its own for each response."""
        seeds = [self._seed(group.seeded, k) for group, k in places]
        parts = [group.parts.get(k, ()) for group, k in places]
        prefixes = tuple(tuple(token for part in found for token in part.tokens.tolist()) for found in parts)
        sampling = replace(self._sampling(draws, seeds), samples=1, prefixes=prefixes)
        return Request([list(group.seeded.prompt.tokens) for group, _ in places], sampling)

    def _sampling(self, draws: Draws, seeds: Sequence[int]) -> Sampling:
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

    def _have_scored(self, group: PendingGroup, sample: int, parts: Sequence[Completion], draws: Draws) -> None:
        """``parts``: a response, span by span of the policies that made it.

        Where responses may be unfinished, those of a group are scored once all have ended.
        """
        response = _joined(parts, draws.max_tokens)
        if draws.budget == math.inf and not group.seeded.begun:
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
    """A group before any of its responses is generated, or with what an earlier stage generated of them."""
    group = PendingGroup(chunk, seeded, samples)
    for sample, response in enumerate(seeded.begun):
        if response.finish_reason == UNFINISHED:
            group.parts[sample] = _spans(response, len(seeded.prompt.tokens))
        else:
            group.ended[sample] = response
    return group


def _spans(response: Response, prompt: int) -> list[Completion]:
    """The inverse of `_joined`, for a response to a prompt of so many tokens."""
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
    """One response, not scored yet. One that ended before ``max_tokens`` for its length is unfinished."""
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
    """The experts under which each token of a response was sampled; None where the engine records none.

    A continuation computes what comes before it again, under its own policy and so perhaps with other experts: of these
    tokens the first record stays, to which the stored log-probs belong.
    """
    joined: list[np.ndarray] = []
    for part in parts:
        if part.routed_experts is None:
            return None
        if len(part.tokens):
            joined.append(part.routed_experts[sum(map(len, joined)) :])
    return np.concatenate(joined)
