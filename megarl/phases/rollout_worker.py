"""Prompts in, scored responses out: what the rollout and the evaluate phase share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.prompts import Prompt, PromptSource, build_prompts, load_tokenizer, stop_token_ids
from megarl.distributed import Peers
from megarl.storage.policies import decode_reference, encode_reference, read_info, read_reference
from megarl.recipe.tables import Recipe
from megarl.rewards import Verifier, build_verifier, reward
from megarl.rollout import build_engine
from megarl.rollout.drift import Drift, check_weights, hugging_face_reference
from megarl.rollout.engine import Completion, Request, RolloutEngine, Sampling, never, response_seed
from megarl.storage.rollouts import Response


@dataclass(frozen=True)
class Question:
    """A prompt, and the number that seeds its responses."""

    number: int
    prompt: Prompt


@dataclass(frozen=True)
class Answer:
    """All responses to a question, which stood in chunk number ``chunk`` of those that were taken, or is CONTINUED."""

    chunk: int
    question: Question
    responses: tuple[Response, ...]


CONTINUED = -1  # the chunk of an answer that an earlier call began


@dataclass
class _Draft:
    """A question that is being answered."""

    chunk: int
    question: Question
    parts: dict[int, list[Completion]] = field(default_factory=dict)  # of the responses that are not finished
    responses: dict[int, Response] = field(default_factory=dict)  # of those that are
    done: bool = False


@dataclass
class Answerer:
    """An engine with one policy, and the verifier of its answers."""

    recipe: Recipe
    tokenizer: Any
    prompts: PromptSource
    verifier: Verifier
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]
    weights_hash: str
    unfinished: list[_Draft] = field(default_factory=list)
    decoding: int = 0  # responses that the engine has taken and not handed out

    @classmethod
    def build(cls, recipe: Recipe, stage: int, policy_dir: Path, for_training: bool = True) -> Answerer:
        """With the engine of ``stage``, which for training records what the recipe lets the actor replay."""
        info = read_info(policy_dir)
        tokenizer = load_tokenizer(policy_dir)
        prompts = build_prompts(recipe, tokenizer)
        experts = for_training and recipe.actor.routing_replay == "engine"
        return cls(
            recipe=recipe,
            tokenizer=tokenizer,
            prompts=prompts,
            verifier=build_verifier(recipe, prompts),
            engine=build_engine(recipe, stage, policy_dir, info.version, routed_experts=experts),
            stop_token_ids=tuple(stop_token_ids(tokenizer, policy_dir)),
            weights_hash=info.weights_hash,
        )

    def load(self, policy_dir: Path) -> None:
        """Answer with another policy from here on."""
        info = read_info(policy_dir)
        self.engine.load_weights(policy_dir, info.version)
        self.weights_hash = info.weights_hash

    def check_weights(self, policy_dir: Path, peers: Peers) -> Drift:
        """Compare the engine with the actor that exported its policy; to be called after every load.

        Beyond the tolerance it is a `UserError`.
        """
        reference = read_reference(policy_dir)
        if reference is None:  # a base model, which is its own reference: computed once for all replicas
            name = f"reference of {self.weights_hash}"
            reference = decode_reference(peers.once(name, lambda: encode_reference(hugging_face_reference(policy_dir))))
        return check_weights(self.engine, reference)

    def answer(
        self,
        chunks: Iterator[Sequence[Question]],
        samples: int,
        temperature: float,
        interrupted: Callable[[], bool] = never,
    ) -> Iterator[Answer]:
        """``samples`` scored responses to each question, question by question as they become whole.

        A chunk is taken when the engine has room for it. What ``interrupted`` leaves unfinished is continued by the
        next call, before any chunk.
        """
        drafts, self.unfinished = self.unfinished, []
        rows: list[list[tuple[_Draft, int]]] = []  # of each request: whose response a completion is

        def requests() -> Iterator[Request]:
            if drafts:
                rows.append([(draft, k) for draft in drafts for k in range(samples) if k not in draft.responses])
                self.decoding += len(rows[-1])
                yield self._continuation(rows[-1], temperature)
            for number, chunk in enumerate(chunks):
                begun = [_Draft(number, question) for question in chunk]
                drafts.extend(begun)
                rows.append([(draft, k) for draft in begun for k in range(samples)])
                self.decoding += len(rows[-1])
                yield self._request(chunk, samples, temperature)

        continues = bool(drafts)
        for number, completion in self.engine.serve(requests(), interrupted):
            self.decoding -= 1
            one = continues and number == 0  # response a prompt
            draft, k = rows[number][completion.prompt if one else completion.prompt * samples + completion.sample]
            draft.parts.setdefault(k, []).append(completion)
            if completion.finish_reason == "interrupted":
                continue
            draft.responses[k] = self._score(draft.question.prompt, draft.parts.pop(k))
            if len(draft.responses) == samples:
                responses = tuple(draft.responses.pop(k) for k in range(samples))
                draft.done = True
                yield Answer(draft.chunk, draft.question, responses)
        self.unfinished = [draft for draft in drafts if not draft.done]
        for draft in self.unfinished:
            draft.chunk = CONTINUED

    def _request(self, chunk: Sequence[Question], samples: int, temperature: float) -> Request:
        seeds = [self._seed(question, k) for question in chunk for k in range(samples)]
        return Request(
            [list(question.prompt.tokens) for question in chunk], self._sampling(temperature, samples, seeds)
        )

    def _continuation(self, rows: Sequence[tuple[_Draft, int]], temperature: float) -> Request:
        """One request with a prompt of its own for each response."""
        seeds = [self._seed(draft.question, k) for draft, k in rows]
        prefixes = tuple(tuple(t for part in draft.parts.get(k, ()) for t in part.tokens.tolist()) for draft, k in rows)
        sampling = replace(self._sampling(temperature, 1, seeds), prefixes=prefixes)
        return Request([list(draft.question.prompt.tokens) for draft, _ in rows], sampling)

    def _sampling(self, temperature: float, samples: int, seeds: Sequence[int]) -> Sampling:
        table = self.recipe.rollout
        return Sampling(
            temperature=temperature,
            max_tokens=table.max_response_tokens,
            samples=samples,
            stop_token_ids=self.stop_token_ids,
            seeds=tuple(seeds),
            timeout=table.response_timeout,
        )

    def _seed(self, question: Question, sample: int) -> int:
        return response_seed(self.recipe.run.seed, question.number, sample)

    def _score(self, prompt: Prompt, parts: Sequence[Completion]) -> Response:
        """``parts``: a response, span by span of the policies that made it."""
        tokens = np.concatenate([part.tokens for part in parts])
        versions = np.concatenate([np.full(len(part.tokens), part.policy_version, np.int32) for part in parts])
        text, finish_reason = self.tokenizer.decode(tokens, skip_special_tokens=True), parts[-1].finish_reason
        return Response(
            tokens=np.asarray(tokens, np.int32),
            logprobs=np.concatenate([part.logprobs for part in parts]).astype(np.float32),
            reward=reward(self.verifier, prompt, text, finish_reason, self.recipe.reward),
            finish_reason=finish_reason,
            policy_version=int(versions[0]),
            policy_versions=None if (versions == versions[0]).all() else versions,
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
