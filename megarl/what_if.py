"""``megarl what-if``: what every objective would do with the stored batches of a stage, at one policy or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.scratch import ask, check_updates, open_stage, policies_of
from megarl.storage.retention import require_policy


def what_if(run_dir: Path, number: int, updates: Sequence[int], batches: int) -> list[dict[str, Any]]:
    """A record for each policy of stage ``number``, stored batch and objective: see
    `megarl.phases.what_if.Comparison`.

    updates: of the stage, after which the policies are to be compared; none: all that are there. batches: how many of
    the stage's, the last ones, which most policies have not trained yet. Changes nothing of the run.
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
    return ask(stage, "what_if", updates=list(updates) or policies_of(stage), batches=last)
