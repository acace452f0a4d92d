"""``megarl audit``: whether all that lies in a run directory agrees, down to each update's groups.

Nothing is changed, and a run may be going on. What is looked at:

- policies (`policies`): files, versions, and that each stage's rollouts came from that stage's policy;
- rollouts (`rollouts`): shards against the ledger, the ledger against the seal, prompts against the data, lags against
  the schedule; of a sample, rewards against the verifier and log-probs against the policy;
- with a token budget (`carried`), what stages leave to later ones: nothing is lost, and what is continued begins with
  what there was;
- updates (`updates`): each exactly once, with what its groups in the store say of rewards, lengths, tokens and lags;
  checkpoints against metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.run_dir import RunDir
from megarl.views.audit.carried import check_carried
from megarl.views.audit.policies import check_policies
from megarl.views.audit.rollouts import check_rollouts
from megarl.views.audit.samples import check_samples
from megarl.views.audit.totals import StageTotals
from megarl.views.audit.updates import check_updates

HASH = 8  # characters of a policy's, so that a line fits into 80 columns
SHOWN = 20  # problems of a kind; of a store that is wrong throughout, there may be millions


@dataclass
class Audit:
    stages: list[StageTotals] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be looked at, and why

    def table(self) -> str:
        """For a terminal."""
        heads = [field.name.partition("_") for field in dataclasses.fields(StageTotals)]
        rows = [[first if rest else "" for first, _, rest in heads], [rest or first for first, _, rest in heads]]
        rows += [[f"{x:,}" if isinstance(x, int) else x[:HASH] for x in vars(row).values()] for row in self.stages]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [f"note: {note}" for note in self.notes]
        ends = [f"does not agree: {problem}" for problem in self.problems] or ["all that was looked at agrees"]
        return "\n".join([*(lines if self.stages else ()), *ends])

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def audit(root: Path, samples: int) -> Audit:
    """Of the run directory ``root``. ``samples``: groups a stage whose rewards and log-probs are computed again."""
    found = Audit()
    try:
        run = RunDir.open(root)
        run.check_prompts()
    except UserError as error:
        found.problems.append(str(error))
        return found
    found.stages = [StageTotals(stage.number) for stage in run.stages()]
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: check_policies(run, found.stages, found.notes),
        lambda: check_rollouts(run, found.stages),
        lambda: check_carried(run, found.stages),
        lambda: check_updates(run, found.stages),
        lambda: check_samples(run, samples, found.notes),
    ]
    for check in checks:
        found.problems += _at_most(check())
    return found


def _at_most(problems: Iterator[str]) -> Iterator[str]:
    left_out = 0
    for number, problem in enumerate(problems):
        if number < SHOWN:
            yield problem
        else:
            left_out += 1
    if left_out:
        yield f"and {left_out:,} more of this kind"
