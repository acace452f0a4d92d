"""Bytes of a run directory, by kind of file: the largest that they get, and at the end of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megarl.planner.assumptions import Assumptions
from megarl.recipe.optimizer import OptimizerBytes
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import expert_type


@dataclass(frozen=True)
class Counts:
    """Numbers of checkpoints and policies that exist at one time."""

    checkpoints: int
    policies: int


def disk_bytes(
    hf: dict[str, Any], recipe: Recipe, parameters: int, assume: Assumptions, trained: int | None = None
) -> dict[str, float]:
    """Bytes on disk by kind of file. trained: number of parameters in a checkpoint; default: all."""
    rollouts = _rollout_bytes(hf, recipe, assume)
    evaluations = _evaluation_bytes(recipe, assume)
    checkpoint = (2.0 + OptimizerBytes.of(recipe).checkpoint) * (parameters if trained is None else trained)
    policy, between = 2.0 * parameters, _between_stages(recipe)
    moments, end = _largest(recipe, between), _end(recipe)

    def whole(counts: Counts) -> float:
        responses = rollouts * recipe.schedule.stages + evaluations
        return responses + counts.checkpoints * checkpoint + counts.policies * policy

    return {
        "rollout store of a stage": rollouts,
        "rollout store of all stages": rollouts * recipe.schedule.stages,
        **({"responses to evaluations": evaluations} if evaluations else {}),
        "one checkpoint": checkpoint,
        "checkpoints at most": checkpoint * max(counts.checkpoints for counts in moments),
        "one export": policy,
        **({"policies between stages, at most": between * policy} if between else {}),
        "policies at most": policy * max(counts.policies for counts in moments),
        "the run directory, at its largest": max(map(whole, moments)),
        "the run directory, at its end": whole(end),
    }


def _rollout_bytes(hf: dict[str, Any], recipe: Recipe, assume: Assumptions) -> float:
    """Bytes of a stage's rollouts. A response is int32 tokens, float32 log-probs and, for routing replay, experts."""
    rollout, prompt = recipe.rollout, assume.mean_prompt * recipe.data.max_prompt_tokens
    response = assume.mean_response * rollout.max_response_tokens
    size = _response_bytes(prompt, response)
    if recipe.actor.routing_replay == "engine":
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
    """Number of policies of the whole run that are evaluated, those for which `Recipe.is_evaluated` holds."""
    total = recipe.schedule.total_updates
    often = [n for n in (recipe.eval.every * recipe.schedule.updates_per_stage, recipe.eval.every_updates) if n]
    both = total // math.lcm(*often) + 1 if len(often) == 2 else 0
    last_alone = bool(often) and all(total % n for n in often)
    return sum(total // n + 1 for n in often) - both + last_alone


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


def _largest(recipe: Recipe, between: int) -> list[Counts]:
    """The two moments of the last stage that can be the largest: writing its last checkpoint, exporting its result."""
    finished, keep = recipe.schedule.stages - 1, recipe.actor.keep_checkpoints
    checkpoints = _checkpoints_of(recipe, finished)
    current = int(finished > 0)  # the policy of the last stage; the first stage's is the run's first
    policies = _policies_of(recipe, finished) + current + between + _copy_of_best(recipe)
    return [
        Counts(checkpoints + min(_saves(recipe) - 1, keep) + 1, policies),
        Counts(checkpoints + min(_saves(recipe), keep), policies + 1),
    ]


def _end(recipe: Recipe) -> Counts:
    stages = recipe.schedule.stages
    return Counts(_checkpoints_of(recipe, stages), _policies_of(recipe, stages) + 1 + _copy_of_best(recipe))


def _saves(recipe: Recipe) -> int:
    """Checkpoints that a stage writes."""
    return math.ceil(recipe.schedule.updates_per_stage / recipe.actor.checkpoint_every)


def _checkpoints_of(recipe: Recipe, finished: int) -> int:
    """Number of checkpoints that ``finished`` finished stages keep."""
    return min(_saves(recipe), recipe.actor.keep_checkpoints) * min(finished, recipe.actor.keep_stages or finished)


def _policies_of(recipe: Recipe, finished: int) -> int:
    """Number of policies that are kept of ``finished`` finished stages: the run's first, and the newest others."""
    others = max(0, finished - 1)
    return 1 + min(others, recipe.actor.keep_policies or others)


def _copy_of_best(recipe: Recipe) -> int:
    """1 if best/ may take disk space: its files are hard links, so only if its policy was removed elsewhere."""
    keep = recipe.actor.keep_policies
    removes = recipe.eval.every_updates > 0 or (keep is not None and recipe.schedule.stages > keep + 1)
    return int(recipe.eval.on and removes)
