"""With a token budget: checks which groups each stage carries on, and that later stages continue them correctly."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np

from megarl.errors import UserError
from megarl.storage.ledger import sealed_groups
from megarl.storage.rollouts import Response, RolloutStore
from megarl.storage.run_dir import RunDir, Stage
from megarl.views.audit.rollouts import StageTotals, check_shard


def check_continued(run: RunDir, totals: list[StageTotals]) -> Iterator[str]:
    """Problems of a run with `rollout.token_budget`; fills in the counts of ``totals``, one for each stage."""
    if run.recipe.rollout.token_budget is None:
        return
    before: list[RolloutStore] = []  # the stores of the stage before, the complete groups first
    for stage in run.stages():
        if not stage.rollouts.exists():
            before = []
            continue
        try:
            stores = [RolloutStore(stage.rollouts), RolloutStore(stage.unfinished)]
        except UserError as error:
            yield str(error)
            before = []
            continue
        with contextlib.suppress(UserError):  # for a damaged shard, which is named by its checksum
            for entry in stores[1].entries:
                yield from check_shard(stage, stage.unfinished, entry)
            yield from _check_groups(stage, stores, before, totals[stage.number])
        knows = stage.number == 0 or (bool(before) and stage.previous.is_sealed())
        yield from _check_seal(stage, stores, knows)
        before = stores


def _check_groups(
    stage: Stage, stores: list[RolloutStore], before: list[RolloutStore], row: StageTotals
) -> Iterator[str]:
    there = sorted({group for store in stores for group in store.group_ids})
    row.generated, row.not_chosen = len(there), 0
    row.carried = len(sealed_groups(stage.rollouts, "carried") or [])
    row.tokens = 0
    for group in there:
        found = [store.read([group])[0] for store in stores if not store.missing([group])]
        versions = np.concatenate([response.versions for response in found[0].responses])
        row.tokens += int((versions == stage.first_update).sum())
        # three versions of a group, newest first: finished by this stage beyond the budget, unfinished at the budget,
        # unfinished in the stage before; each must begin with the tokens of the next older one
        found += [store.read([group])[0] for store in before if not store.missing([group])]
        for new, old in itertools.pairwise(found):
            if not all(map(_continues, old.responses, new.responses)):
                yield f"group {group} does not continue in stage {stage.number} from its unfinished responses"


def _continues(old: Response, new: Response) -> bool:
    """Whether ``new`` begins with the tokens, log-probs and versions of ``old``."""
    columns = ((response.tokens, response.rollout_logprobs, response.versions) for response in (old, new))
    return all(np.array_equal(a, b[: len(a)]) for a, b in zip(*columns, strict=True))


def _check_seal(stage: Stage, stores: list[RolloutStore], knows_candidates: bool) -> Iterator[str]:
    complete, there = stores[0], {group for store in stores for group in store.group_ids}
    where, wanted = f"stage {stage.number}", stage.run.recipe.groups_per_stage
    carried = sealed_groups(stage.rollouts, "carried") or []
    if stage.is_sealed() and list(complete.chosen) != complete.group_ids[:wanted]:
        yield f"{where} is sealed with other groups to train than the first {wanted} complete ones"
    if lost := set(carried).difference(there):
        yield f"{where} carries group {min(lost)} on, which is in no shard"
    if not knows_candidates:
        return  # of a branch, which lacks the stages before
    known = set(stage.candidates())
    if foreign := there.difference(known):
        yield f"{where} has group {min(foreign)}, which is not one of its candidates"
    if stage.is_sealed() and carried != sorted(known.difference(complete.chosen)):
        yield f"{where} does not carry on exactly the groups that it did not train"
