"""Partial rollouts (BAPO, section 5.3): groups that one stage begins and a later stage finishes or trains.

With ``rollout.token_budget`` a response gets at most that many tokens in one stage. A group with a response that is not
finished by then is stored in ``rollouts/unfinished/``, without rewards; each token keeps the version of the policy that
sampled it. The candidates of a stage are the groups that it begins and those that earlier stages began but did not
train. It trains the first complete ones by id, and the others are carried into the next stage. So no group is lost, and
which groups are trained depends neither on speed nor on kills.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.errors import UserError
from megarl.storage.ledger import is_sealed, sealed_groups
from megarl.storage.run_dir import Stage


def carried_into(stage: Stage) -> list[int]:
    """The sorted ids of the groups that earlier stages carried into ``stage``.

    `UserError` if the stage before is not sealed, because only its seal names them.
    """
    if stage.run.recipe.rollout.token_budget is None or stage.number == 0:
        return []
    before = stage.previous
    if not is_sealed(before.rollouts):
        command = f"megarl rollout {stage.run.root} --stage {before.number}"
        raise UserError(
            f"{before.rollouts} is not sealed, so the groups that stage {stage.number} continues are not known: "
            f"run `{command}`"
        )
    return sealed_groups(before.rollouts, "carried") or []


def candidates(stage: Stage) -> Sequence[int]:
    """The sorted ids of all groups that ``stage`` may train."""
    carried = carried_into(stage)
    return [*carried, *stage.groups] if carried else stage.groups
