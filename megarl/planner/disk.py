"""Bytes of a run directory, by kind of file: at most, and at the end of the run."""

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
    stages, actor = recipe.schedule.stages, recipe.actor
    rollouts, evaluations = stages * _rollout_bytes(hf, recipe, assume), _evaluation_bytes(recipe, assume)
    checkpoint = (2.0 + OptimizerBytes.of(recipe).checkpoint) * (parameters if trained is None else trained)
    policy = 2.0 * parameters
    saves = math.ceil(recipe.schedule.updates_per_stage / actor.checkpoint_every)  # in a stage
    kept, stay = min(saves, actor.keep_checkpoints), actor.keep_stages or stages
    # before the last stage's checkpoints are removed, the last of them is written
    checkpoints = kept * min(stages - 1, stay) + min(saves, kept + 1)
    removes = actor.keep_policies is not None and stages > actor.keep_policies + 1
    # best/ has hard links, which take space only if their policy was removed elsewhere
    best = int(recipe.eval.on and (removes or recipe.eval.every_updates > 0))
    policies = 2 + min(stages - 1, actor.keep_policies or stages) + best  # with the run's first, and its result
    most = policies + _between_stages(recipe) + removes
    return {
        "rollout store of all stages": rollouts,
        **({"responses to evaluations": evaluations} if evaluations else {}),
        "one checkpoint": checkpoint,
        "checkpoints at most": checkpoints * checkpoint,
        "one export": policy,
        "policies at most": most * policy,
        "the run directory, at most": rollouts + evaluations + checkpoints * checkpoint + most * policy,
        "the run directory, at its end": rollouts
        + evaluations
        + kept * min(stages, stay) * checkpoint
        + policies * policy,
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
    return of_a_policy * sum(map(recipe.is_evaluated, range(recipe.schedule.total_updates + 1)))


def _response_bytes(prompt: float, response: float) -> float:
    """Bytes of a stored response with its prompt; both in tokens."""
    return 4 * (prompt + response) + 4 * response


def _between_stages(recipe: Recipe) -> int:
    """Most policies inside a stage that exist at a time: for engines of a live run, and for evaluation."""
    schedule, rule, every = recipe.schedule, recipe.schedule.lag_rule, recipe.eval.every_updates
    published = rule.max_lag // rule.sync_every + (rule.sync_every < schedule.updates_per_stage)
    return published + (math.ceil(schedule.updates_per_stage / every) if every else 0)
