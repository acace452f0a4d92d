"""Bytes of a run directory, by kind of file: the largest that they get, and at the end of the run."""

from __future__ import annotations

import math
from typing import Any

from megarl.planner.assumptions import Assumptions
from megarl.recipe.optimizer import OptimizerBytes
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import expert_type


def disk_bytes(
    hf: dict[str, Any], recipe: Recipe, parameters: int, assume: Assumptions, trained: int | None = None
) -> dict[str, float]:
    """Bytes on disk by kind of file. trained: number of parameters in a checkpoint; default: all."""
    rollouts = _rollout_bytes(hf, recipe, assume)
    evaluations = _evaluation_bytes(recipe, assume)
    checkpoint = (2.0 + OptimizerBytes.of(recipe).checkpoint) * (parameters if trained is None else trained)
    policy, between = 2.0 * parameters, _between_stages(recipe)
    *largest, end = _moments(recipe, between)

    def whole(checkpoints: int, policies: int) -> float:
        return rollouts * recipe.schedule.stages + evaluations + checkpoints * checkpoint + policies * policy

    return {
        "rollout store of a stage": rollouts,
        "rollout store of all stages": rollouts * recipe.schedule.stages,
        **({"responses to evaluations": evaluations} if evaluations else {}),
        "one checkpoint": checkpoint,
        "checkpoints at most": checkpoint * max(checkpoints for checkpoints, _ in largest),
        "one export": policy,
        **({"policies between stages, at most": between * policy} if between else {}),
        "policies at most": policy * max(policies for _, policies in largest),
        "the run directory, at its largest": max(whole(*moment) for moment in largest),
        "the run directory, at its end": whole(*end),
    }


def _rollout_bytes(hf: dict[str, Any], recipe: Recipe, assume: Assumptions) -> float:
    """Bytes of a stage's rollouts. A response is int32 tokens, float32 log-probs and, for routing replay, experts."""
    rollout, prompt = recipe.rollout, assume.mean_prompt * recipe.data.max_prompt_tokens
    response = assume.mean_response * rollout.max_response_tokens
    size = _response_bytes(prompt, response)
    if recipe.actor.trains_recorded_experts:
        width = expert_type(hf["num_experts"]).itemsize
        size += (prompt + response) * hf["num_hidden_layers"] * hf["num_experts_per_tok"] * width
    return recipe.candidates_per_stage * rollout.responses_per_prompt * size


def _evaluation_bytes(recipe: Recipe, assume: Assumptions) -> float:
    of_a_policy = sum(
        suite.prompts
        * suite.samples
        * _response_bytes(
            assume.mean_prompt * suite.data.max_prompt_tokens, assume.mean_response * suite.max_response_tokens
        )
        for suite in recipe.suites
    )
    return of_a_policy * _evaluated_policies(recipe)


def _evaluated_policies(recipe: Recipe) -> int:
    """Number of policies for which `Recipe.is_evaluated` holds."""
    total = recipe.schedule.total_updates
    often = [n for n in (recipe.eval.every * recipe.schedule.updates_per_stage, recipe.eval.every_updates) if n]
    return len({total}.union(*(range(0, total, n) for n in often))) if often else 0


def _response_bytes(prompt: float, response: float) -> float:
    """Bytes of a stored response with its prompt; both in tokens."""
    return 4 * (prompt + response) + 4 * response


def _between_stages(recipe: Recipe) -> int:
    """Most policies inside a stage that exist at a time: for engines of a live run, and for evaluation."""
    schedule, every, size = recipe.schedule, recipe.eval.every_updates, recipe.schedule.updates_per_stage
    published = evaluated = 0
    if schedule.kind == "live":
        published = schedule.lag_rule.max_lag // schedule.lag_rule.sync_every + 1
    if every:  # the most multiples of it that lie inside one stage
        evaluated = (every - math.gcd(size, every) + size - 1) // every
    return published + evaluated


def _moments(recipe: Recipe, between: int) -> list[tuple[int, int]]:
    """(checkpoints, policies) that exist at three moments.

    In the last stage, as its last checkpoint is written, and as its result is exported; and at the run's end.
    """
    actor, stages = recipe.actor, recipe.schedule.stages
    saves = math.ceil(recipe.schedule.updates_per_stage / actor.checkpoint_every)  # in a stage
    kept = min(saves, actor.keep_checkpoints)

    def of_stages(finished: int) -> tuple[int, int]:
        """What they keep; of policies the run's first, and the newest others."""
        others = max(0, finished - 1)
        policies = 1 + min(others, actor.keep_policies or others)
        return kept * min(finished, actor.keep_stages or finished), policies

    # best/ has hard links, which take space only if their policy was removed elsewhere
    removes = recipe.eval.every_updates > 0 or (actor.keep_policies is not None and stages > actor.keep_policies + 1)
    best = int(recipe.eval.on and removes)
    (checkpoints, policies), (at_end, policies_at_end) = of_stages(stages - 1), of_stages(stages)
    policies += int(stages > 1) + between + best  # the first stage's policy is the run's first
    return [
        (checkpoints + min(saves - 1, actor.keep_checkpoints) + 1, policies),
        (checkpoints + kept, policies + 1),
        (at_end, policies_at_end + 1 + best),
    ]
