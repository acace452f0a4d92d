"""Partial rollouts (BAPO, section 5.3): groups that a stage has begun and a later one finishes or trains.

With ``rollout.token_budget`` a response gets so many tokens a stage. A group of which one has not ended by then goes to
the store ``rollouts/unfinished/`` as it is, without rewards, and each token keeps the version of its policy. Candidates
of a stage are the groups that it begins and all that earlier stages began and did not train; it trains those that are
complete, the first by id. So no group is lost, and what is trained depends neither on speed nor on kills.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.errors import UserError
from megarl.storage.ledger import is_sealed, sealed_groups
from megarl.storage.run_dir import Stage


def carried_into(stage: Stage) -> list[int]:
    """The groups that are begun when ``stage`` is, sorted; `UserError` where the stage before is not sealed."""
    if stage.run.recipe.rollout.token_budget is None or stage.number == 0:
        return []
    before = stage.previous
    if not is_sealed(before.rollouts):
        command = f"megarl rollout {stage.run.root} --stage {before.number}"
        raise UserError(
            f"{before.rollouts} is not sealed, so what stage {stage.number} continues is not known: run `{command}`"
        )
    return sealed_groups(before.rollouts, "carried") or []


def candidates(stage: Stage) -> Sequence[int]:
    """All groups that ``stage`` may train, sorted."""
    carried = carried_into(stage)
    return [*carried, *stage.groups] if carried else stage.groups
