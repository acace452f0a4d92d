"""Prompts in, scored responses out: what the rollout and the evaluate phase share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.data import Prompt, PromptSource, build_prompts, load_tokenizer, stop_token_ids
from megarl.policy import read_info
from megarl.rewards import Verifier, build_verifier, reward
from megarl.rollout import build_engine
from megarl.rollout.engine import Completion, Request, RolloutEngine, Sampling, never, response_seed
from megarl.store import Response


@dataclass(frozen=True)
class Question:
    """A prompt, and the number that seeds its responses."""

    number: int
    prompt: Prompt


@dataclass(frozen=True)
class Answer:
    """All responses to a question, which stood in chunk number ``chunk`` of those that were taken."""

    chunk: int
    question: Question
    responses: tuple[Response, ...]


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

    @classmethod
    def build(cls, recipe: Recipe, stage: int, policy_dir: Path) -> Answerer:
        """With the engine of ``stage``."""
        info = read_info(policy_dir)
        tokenizer = load_tokenizer(policy_dir)
        prompts = build_prompts(recipe, tokenizer)
        return cls(
            recipe=recipe,
            tokenizer=tokenizer,
            prompts=prompts,
            verifier=build_verifier(recipe, prompts),
            engine=build_engine(recipe, stage, policy_dir, info.version),
            stop_token_ids=tuple(stop_token_ids(tokenizer, policy_dir)),
            weights_hash=info.weights_hash,
        )

    def answer(
        self,
        chunks: Iterator[Sequence[Question]],
        samples: int,
        temperature: float,
        interrupted: Callable[[], bool] = never,
    ) -> Iterator[Answer]:
        """``samples`` scored responses to each question, question by question as they become whole.

        A chunk is taken when the engine has room for it. Questions that ``interrupted`` leaves unfinished do not come
        out.
        """
        taken: list[Sequence[Question]] = []

        def requests() -> Iterator[Request]:
            for chunk in chunks:
                taken.append(chunk)
                yield self._request(chunk, samples, temperature)

        partial: dict[tuple[int, int], dict[int, Response]] = {}
        for number, completion in self.engine.serve(requests(), interrupted):
            if completion.finish_reason == "interrupted":
                continue
            place = number, completion.prompt
            question = taken[number][completion.prompt]
            responses = partial.setdefault(place, {})
            responses[completion.sample] = self._score(question.prompt, completion)
            if len(responses) == samples:
                del partial[place]
                yield Answer(number, question, tuple(responses[k] for k in range(samples)))

    def _request(self, chunk: Sequence[Question], samples: int, temperature: float) -> Request:
        seed, table = self.recipe.run.seed, self.recipe.rollout
        sampling = Sampling(
            temperature=temperature,
            max_tokens=table.max_response_tokens,
            samples=samples,
            stop_token_ids=self.stop_token_ids,
            seeds=tuple(response_seed(seed, question.number, k) for question in chunk for k in range(samples)),
            timeout=table.response_timeout,
        )
        return Request([list(question.prompt.tokens) for question in chunk], sampling)

    def _score(self, prompt: Prompt, completion: Completion) -> Response:
        text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return Response(
            tokens=np.asarray(completion.tokens, np.int32),
            logprobs=np.asarray(completion.logprobs, np.float32),
            reward=reward(self.verifier, prompt, text, completion.finish_reason, self.recipe.reward),
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
        )
