"""Prompts in, scored responses out: what the rollout and the evaluate phase share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.data import Prompt, PromptSource, build_prompts, load_tokenizer, stop_token_ids
from megarl.policy import read_info
from megarl.rewards import Verifier, build_verifier, reward
from megarl.rollout import build_engine
from megarl.rollout.engine import Completion, RolloutEngine, Sampling
from megarl.store import Response


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
    def build(cls, recipe: Recipe, policy_dir: Path) -> Answerer:
        info = read_info(policy_dir)
        tokenizer = load_tokenizer(policy_dir)
        prompts = build_prompts(recipe, tokenizer)
        return cls(
            recipe=recipe,
            tokenizer=tokenizer,
            prompts=prompts,
            verifier=build_verifier(recipe, prompts),
            engine=build_engine(recipe, policy_dir, info.version),
            stop_token_ids=tuple(stop_token_ids(tokenizer, policy_dir)),
            weights_hash=info.weights_hash,
        )

    def answer(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], samples: int, temperature: float
    ) -> list[tuple[Response, ...]]:
        """``samples`` scored responses to each prompt; ``seeds`` has one entry a response, prompt by prompt."""
        sampling = Sampling(
            temperature=temperature,
            max_tokens=self.recipe.rollout.max_response_tokens,
            samples=samples,
            stop_token_ids=self.stop_token_ids,
            seeds=tuple(seeds),
        )
        responses: dict[tuple[int, int], Response] = {}
        for completion in self.engine.generate([list(p.tokens) for p in prompts], sampling):
            responses[completion.prompt, completion.sample] = self._score(prompts[completion.prompt], completion)
        return [tuple(responses[i, k] for k in range(samples)) for i in range(len(prompts))]

    def _score(self, prompt: Prompt, completion: Completion) -> Response:
        text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return Response(
            tokens=np.asarray(completion.tokens, np.int32),
            logprobs=np.asarray(completion.logprobs, np.float32),
            reward=reward(self.verifier, prompt, text, completion.finish_reason, self.recipe.reward),
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
        )
