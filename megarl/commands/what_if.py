"""``megarl what-if``: the gradient of every objective on stored batches of a stage, at one or several policies.

`what_if` makes records, one per policy, objective and batch; the other functions make a table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.commands.scratch import open_staged, policies_of, run_scratch_phase, updates_within
from megarl.errors import UserError
from megarl.estimates import mean_of_replicates
from megarl.foreign import quoted
from megarl.storage.run_dir.retention import require_policy
from megarl.views.run_reader import muted_by

COLUMNS = ("kept", "clipped", "vetoed", "masked", "norm", "cosine", "cosine_to_grpo")
# columns of the terminal's table, which fits into 80 characters because shares have no intervals there
_WIDTHS = {"kept": 6, "clipped": 8, "vetoed": 7, "masked": 7, "norm": 12, "to fresh": 11, "to GRPO": 11}


def what_if(run_dir: Path, number: int, updates: Sequence[int], batches: int) -> list[dict[str, Any]]:
    """A record for each policy of stage ``number``, stored batch and objective: see `megarl.phases.what_if`. The run
    itself is not changed.

    updates: which policies, by the number of updates of the run that they have had, as in the records; empty: all that
    exist.
    batches: how many batches of the stage; the last ones are used, because most policies have not trained on them yet.
    """
    stage = open_staged(run_dir, number)
    if stage.run.recipe.actor.lora is not None:
        raise UserError("what-if compares gradients of all weights, but this run trains only adapters ([actor.lora])")
    stage.run.check_prompts()
    if not stage.is_sealed():
        raise UserError(
            f"{stage.rollouts} is not sealed: run `megarl rollout {quoted(stage.run.root)} --stage {number}`"
        )
    inside = updates_within(stage, updates) or policies_of(stage)
    if stage.run.recipe.actor.routing_replay == "actor":  # replays the routing of the policy that began the stage
        require_policy(stage)
    total = stage.run.recipe.schedule.updates_per_pass
    if not 2 <= batches <= total:
        raise UserError(f"--batches {batches}: intervals need at least 2, and the stage has only {total} batches")
    last = list(range(total - batches, total))
    records = run_scratch_phase(stage, "what_if", updates=inside, batches=last)
    return [record | {"update": stage.first_update + record["update"]} for record in records]


# ------------------------------------------------------------------------------------------------------------- table


def estimates(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object per policy and objective.

    It has [mean, low, high] of each column, with 95 % intervals over batches; ``values`` has the numbers of the single
    batches. A column that an objective does not have is left out, and so is the cosine of a gradient that is 0 in every
    batch.
    """
    records = [record | _muted(record) for record in records]
    found: list[dict[str, Any]] = []
    for update, objective in dict.fromkeys((r["update"], r["objective"]) for r in records):
        mine = [r for r in records if (r["update"], r["objective"]) == (update, objective)]
        row: dict[str, Any] = {"update": update, "objective": objective, "batches": len(mine), "values": {}}
        for column in (*COLUMNS, "ess"):
            values = [r[column] for r in mine if r.get(column) is not None]
            if len(values) > 1:
                mean, bounds = mean_of_replicates(np.array(values))
                row[column] = [mean, *bounds]
                row["values"][column] = values
        found.append(row)
    return found


def _muted(record: dict[str, Any]) -> dict[str, float]:
    """The columns clipped, vetoed and masked of a record; what is neither clipped nor vetoed is masked."""
    fractions = record.get("fractions", {})
    words = {"clip": "clipped", "veto": "vetoed"}
    return {words.get(cause, "masked"): fractions[metric] for metric, cause in muted_by([fractions]).items()}


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table for a terminal."""
    lines = [
        f"means over {rows[0]['batches']} batches, ± 95 %: shares of tokens; norm of the gradient;",
        "its cosine to GRPO's gradient on new responses of the policy to the same prompts",
        "(to fresh) and on the same batch (to GRPO). Row fresh: GRPO on one fresh batch,",
        "so its cosine to fresh shows the noise of sampling alone",
    ]
    for update in dict.fromkeys(row["update"] for row in rows):
        head = "".join(f"{name:>{width}}" for name, width in _WIDTHS.items())
        ess = next(_text(row["ess"]) for row in rows if row["update"] == update and "ess" in row)
        lines += ["", f"policy after {update} updates: effective sample size {ess}", f"{'':17}{head}"]
        lines += [f"{row['objective']:17}{_cells(row)}" for row in rows if row["update"] == update]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    shares = [f"{row[column][0]:.3f}" if column in row else "-" for column in COLUMNS[:4]]
    others = [_text(row.get("norm"), ".2g"), *(_text(row.get(column), ".2f") for column in COLUMNS[5:])]
    cells = [*shares, *(cell.replace(" ", "") for cell in others)]
    # a norm such as 1.5e-15 leaves no room for its interval
    fitting = [c if len(c) < width else c.split("±")[0] for c, width in zip(cells, _WIDTHS.values(), strict=True)]
    return "".join(f" {cell:>{width - 1}}" for cell, width in zip(fitting, _WIDTHS.values(), strict=True))


def _text(estimate: list[float] | None, digits: str = ".3f") -> str:
    """Mean ± half of the interval."""
    if not estimate:
        return "-"
    # from 100 on, ".2g" would say "1e+02"
    return " ± ".join(f"{x:{digits if x < 100 else '.0f'}}" for x in (estimate[0], estimate[2] - estimate[0]))
