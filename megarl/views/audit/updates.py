"""Updates: checks that each is there exactly once, and recomputes its metrics from the groups in the store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.errors import UserError
from megarl.storage.checked_json import read_intact_lines
from megarl.storage.checkpoints import Damaged, checkpoints, read_manifest
from megarl.storage.metrics import agrees
from megarl.storage.metrics.summary import ages, summary
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import RunDir, Stage
from megarl.views.audit.rollouts import StageTotals


def check_updates(run: RunDir, totals: list[StageTotals]) -> Iterator[str]:
    """Problems of metrics.jsonl and of checkpoints; fills in the counts of ``totals``."""
    lines = read_intact_lines(run.metrics)[0] if run.metrics.is_file() else []
    by_stage: dict[int, list[dict[str, Any]]] = {stage.number: [] for stage in run.stages()}
    for line in lines:
        if line.get("stage") not in by_stage:
            yield f"{run.metrics} has a line of stage {line.get('stage')}, which this run does not have"
        else:
            by_stage[line["stage"]].append(line)
    numbers: list[Any] = [line.get("update") for line in lines]
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            yield f"{run.metrics}: update {after} follows update {before}"
    for stage in run.stages():
        yield from _check_stage(stage, by_stage[stage.number], totals[stage.number])
        yield from _check_checkpoints(stage, len(by_stage[stage.number]))


def _check_stage(stage: Stage, lines: list[dict[str, Any]], row: StageTotals) -> Iterator[str]:
    row.updates, size = len(lines), stage.run.recipe.schedule.updates_per_stage
    if lines and lines[0]["update"] != stage.first_update + 1:
        yield f"stage {stage.number} begins with update {lines[0]['update']}, not {stage.first_update + 1}"
    if lines and stage.is_trained() and len(lines) != size:
        yield f"stage {stage.number} is trained, but has {len(lines)} updates in metrics.jsonl, not {size}"
    if not stage.rollouts.exists():
        if lines:
            yield f"stage {stage.number} has {len(lines)} updates, but {stage.rollouts} is gone"
        return
    try:
        store = RolloutStore(stage.rollouts, one_policy=stage.run.recipe.schedule.one_policy)
    except UserError:
        return  # `check_rollouts` reports it
    if stage.run.recipe.rollout.oversample > 1 and not stage.is_sealed():
        return  # which groups a live stage has chosen so far is not on disk
    trained: set[int] = set()
    passes: dict[int, set[int]] = {}
    for line in lines:
        inside = line["update"] - 1 - stage.first_update
        this_pass = passes.setdefault(stage.run.recipe.schedule.batch_of(inside)[1], set())
        ids = stage.groups_of_update(store.chosen, inside)
        if not ids or store.missing(ids):
            yield f"update {line['update']} has no groups in {stage.rollouts}"
            continue
        if twice := this_pass.intersection(ids):
            yield f"update {line['update']} trains group {min(twice)} again"
        again = trained.issuperset(ids)
        this_pass.update(ids)
        trained.update(ids)
        try:
            groups = store.read(ids)
        except UserError:
            continue  # `check_rollouts` reports it
        row.trained_tokens += 0 if again else line.get("trained_tokens", 0)
        yield from _compare(stage, line, groups)
    row.trained = len(trained)
    row.pending = row.generated - row.not_chosen - row.carried - row.trained


def _compare(stage: Stage, line: dict[str, Any], groups: Sequence[Group]) -> Iterator[str]:
    """Problems where a line of metrics.jsonl differs from the metrics that its groups give."""
    if len({len(group.responses) for group in groups}) > 1:
        return  # `check_rollouts` reports it
    recipe, inside = stage.run.recipe, line["update"] - 1 - stage.first_update
    expected: dict[str, Any] = summary(list(groups)) | _tokens(groups, recipe.objective.zero_variance == "drop")
    expected |= ages(stage, inside, groups)
    if "skipped_update" in line:
        expected.pop("trained_tokens")
    for name, value in expected.items():
        if line.get(name) != value:
            yield f"update {line['update']}: {name} is {line.get(name)} in metrics.jsonl, but its groups give {value}"


def _tokens(groups: Sequence[Group], drops: bool) -> dict[str, int]:
    """``tokens``: all that pass through the model, prompts included; ``trained_tokens``: those that have a loss."""
    kept = [g for g in groups if not drops or len({response.reward for response in g.responses}) > 1]
    trained = sum(response.sampled_tokens for group in kept for response in group.responses)
    passed = sum(len(response.tokens) for group in kept for response in group.responses)
    # the last token of a response is predicted, but not read
    prompts = sum((len(group.prompt_tokens) - 1) * len(group.responses) for group in kept)
    if not kept:  # one response passes through the model, without a loss
        prompts = len(groups[0].prompt_tokens) - 1 + len(groups[0].responses[0].tokens)
    return {"tokens": passed + prompts, "trained_tokens": trained}


def _check_checkpoints(stage: Stage, done: int) -> Iterator[str]:
    if stage.checkpoints.is_symlink():
        return  # checkpoints of the run from which this one branched
    for update, path in checkpoints(stage.checkpoints):
        try:
            manifest = read_manifest(path)
        except Damaged:
            continue  # its checksum names it
        if update > done:
            yield f"{path} is of update {update} of the stage, but metrics.jsonl has {done}"
        elif not agrees(stage.run.metrics, manifest.position):
            yield f"{path} does not belong to the lines that metrics.jsonl has"
