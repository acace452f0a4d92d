"""``megarl what-if``: what every objective would do with the stored batches of a stage, at one policy or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.scratch import ask, check_updates, open_stage, policies_of
from megarl.storage.ledger import sealed_external
from megarl.storage.retention import require_policy
from megarl.storage.run_dir import Stage


def what_if(
    run_dir: Path, number: int, updates: Sequence[int], batches: int, fresh: tuple[Path, int] | None = None
) -> list[dict[str, Any]]:
    """A record for each policy of stage ``number``, stored batch and objective: see
    `megarl.phases.what_if.Comparison`.

    updates: of the stage, after which the policies are to be compared; none: all that are there. batches: how many of
    the stage's, the last ones, which most policies have not trained yet. fresh: a run directory and a stage of it whose
    rollouts that policy has generated, in the place of new ones by the built-in engine. Changes nothing of the run.
    """
    stage = open_stage(run_dir, number)
    if stage.run.recipe.actor.lora is not None:
        raise UserError("what-if compares gradients of all weights, and [actor.lora] of this run trains adapters alone")
    stage.run.check_prompts()
    if not stage.is_sealed():
        raise UserError(f"{stage.rollouts} is not sealed: megarl rollout {stage.run.root} --stage {number}")
    check_updates(stage, list(updates))
    if stage.run.recipe.actor.routing_replay == "actor":  # of the policy that began the stage
        require_policy(stage)
    total = stage.run.recipe.schedule.updates_per_pass
    if not 2 <= batches <= total:
        raise UserError(f"--batches {batches}: intervals need 2 at least, and the stage has {total}")
    last = list(range(total - batches, total))
    given = None if fresh is None else str(_given(stage, updates, open_stage(*fresh)).rollouts.resolve())
    return ask(stage, "what_if", updates=list(updates) or policies_of(stage), batches=last, fresh=given)


def _given(stage: Stage, updates: Sequence[int], fresh: Stage) -> Stage:
    """``fresh``; `UserError` where its gradient would not be comparable. The phase compares the policies."""
    if len(updates) != 1:
        raise UserError("--fresh-stage has rollouts of one policy: name it with --update, once")
    if fresh.rollouts.resolve() == stage.rollouts.resolve():
        raise UserError(
            f"--fresh-stage {fresh.number}: the same responses as the stored ones show nothing of staleness"
        )
    if not fresh.is_sealed():
        raise UserError(f"{fresh.rollouts} is not sealed: megarl rollout {fresh.run.root} --stage {fresh.number}")
    if fresh.run.recipe.rollout.token_budget is not None:
        raise UserError(f"{fresh.rollouts}: with rollout.token_budget several policies generate a stage")
    if sealed_external(fresh.rollouts):
        raise UserError(f"{fresh.rollouts} came from elsewhere, and says of its policy what nobody here can check")
    drawn = ("temperature", "max_response_tokens", "responses_per_prompt")
    for name, one, other in (
        ("reward", stage.run.recipe.reward, fresh.run.recipe.reward),
        *((f"rollout.{key}", getattr(stage.rollout, key), getattr(fresh.rollout, key)) for key in drawn),
    ):
        if one != other:
            raise UserError(
                f"{fresh.run.root} has another {name} than {stage.run.root}: its gradient is of something else"
            )
    return fresh
