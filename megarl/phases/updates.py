"""Makes the updates of a stage, staged or live, with checkpoints and metrics, and exports the policy at the end.

Updates are counted from 0 at the beginning of the stage; metrics.jsonl and messages count those of the run from 1.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl.actor import checkpoint, packing, parallel
from megarl.actor.frozen import Field, FrozenPolicy
from megarl.actor.nonfinite import NonFiniteUpdate
from megarl.actor.packing import Sample
from megarl.actor.step import Actor, train_step, with_proximal
from megarl.errors import STOPPED, UserError
from megarl.heartbeats import beat
from megarl.objectives import Objective, build_objective, frozen_logprobs, updates_per_step
from megarl.phases.export import Exporter
from megarl.phases.samples import (
    describe,
    lengths_by_sign,
    throughput,
    to_samples,
    token_texts,
    tokens_by_group,
)
from megarl.phases.stop import StopRequest
from megarl.storage.checked_json import append_json
from megarl.storage.checkpoints import checkpoints, read_manifest, read_metrics, set_aside
from megarl.storage.files import appears
from megarl.storage.metrics import NOTHING, MetricsWriter, Position
from megarl.storage.metrics.summary import ages, by_columns, summary
from megarl.storage.rollouts import Group
from megarl.storage.run_dir import RunDir, Stage

# of one update: its groups, the metrics of their age and of the wait for them, its samples, this rank's micro-batches
Batch = tuple[list[Group], dict[str, Any], list[Sample], list[packing.MicroBatch]]


class Batches(Protocol):
    """The source of the groups that the updates of a stage train."""

    def read(self, update: int) -> list[Group] | None:
        """The groups of an update; None if a stop was asked for while waiting for them. Collective."""

    def trained(self, updates: int) -> None:
        """Called when ``updates`` updates of the stage are made. Collective."""


def build_actor(stage: Stage, device: torch.device, start: Start) -> Actor:
    """The actor with the checkpoint of ``start``, or else with the run's first policy. Collective.

    It has the frozen policies that its updates need.
    """
    beat("loading of the model", stage.policy.name)
    actor = Actor.build(stage.run.recipe, stage.run.base, device, load=start.checkpoint is None)
    actor.frozen = frozen_policies(_objective(stage.run), stage)
    if start.checkpoint is not None:
        beat("load", start.checkpoint.name)
        checkpoint.load(actor, start.checkpoint)
        if stage.number == start.done == 0:  # the checkpoint is another run's
            actor.skipped_updates = 0
    return actor


def frozen_policies(objective: Objective, stage: Stage) -> list[FrozenPolicy]:
    """The policies whose log-probs or routing an update needs in addition to those of the current policy.

    The run's first policy is the reference of a KL term. The stage's first policy gives recomputed behaviour log-probs
    and the experts to replay.
    """
    recipe = stage.run.recipe
    wanted, frozen = frozen_logprobs(objective, recipe.schedule.sync_every), []
    if "ref_logprobs" in wanted:
        frozen.append(FrozenPolicy.build(("ref_logprobs",), recipe, stage.run.base))
    behaviour: list[Field] = ["old_logprobs"] if "old_logprobs" in wanted else []
    if recipe.actor.routing_replay == "actor":
        behaviour.append("routed_experts")
    if behaviour:
        frozen.append(FrozenPolicy.build(tuple(behaviour), recipe, stage.policy))
    return frozen


def make_updates(
    actor: Actor, stage: Stage, start: Start, batches: Batches, stop: StopRequest, exporter: Exporter
) -> None:
    """Make the updates of ``stage`` from ``start`` on, save checkpoints, and export ``stage.next.policy``. Collective.

    Exits with `STOPPED`, after saving a checkpoint, if a stop is asked for.
    """
    metrics = _open_metrics(stage, start)
    try:
        _Updates(actor, stage, batches, exporter, metrics).make(start.done, stop)
        if metrics:
            metrics.sync()
        exporter.export(stage.next.first_update, stage.next.policy)
    finally:
        if metrics:
            metrics.close()  # last, because it may wait for tracker servers, and no rank waits for this one any more
    if parallel.reports_metrics():
        remove_checkpoints(stage.run, finished=stage.number + 1)


@dataclass
class _Updates:
    actor: Actor
    stage: Stage
    batches: Batches
    exporter: Exporter
    metrics: MetricsWriter | None  # on the one rank that writes them

    def __post_init__(self) -> None:
        self.run, self.recipe = self.stage.run, self.stage.run.recipe
        self.objective, self.total = _objective(self.run), self.recipe.schedule.updates_per_stage
        self.step = updates_per_step(self.objective, self.recipe.schedule.sync_every)  # a step's length, in updates

    def make(self, done: int, stop: StopRequest) -> None:
        """Make the updates that follow the first ``done`` of the stage."""
        actor, saved = self.actor, done
        ready: deque[Batch] = deque()
        for update in range(done, self.total):
            start = time.perf_counter()
            beat("update", f"update {self.stage.first_update + update + 1}")
            if not ready:
                ready.extend(self._read_step(update))
            asked = not ready  # to stop, while waiting for groups
            if ready:
                try:
                    self._make_one(update, ready.popleft(), start)
                except TooManySkipped:
                    if update > saved and update % self.step == 0:
                        self._save(update, wait=True)
                    checkpoint.finish(actor)
                    raise
            updates = update + (not asked)
            # never stop within a step: the log-probs of its proximal policy are only in memory
            stopping = asked or (updates < self.total and not ready and stop.agreed(actor.device))
            last = updates == self.total or stopping
            checkpoint.finish(actor, wait=False)
            if updates > saved and (updates % self.recipe.actor.checkpoint_every == 0 or last):
                self._save(updates, wait=last)
                saved = updates
            if stopping:
                checkpoint.finish(actor)
                sys.exit(STOPPED)

    def _save(self, updates: int, wait: bool) -> None:
        if self.metrics:
            self.metrics.sync()  # a checkpoint relies on the lines of its updates being on disk
        keep = self.recipe.actor.keep_checkpoints
        checkpoint.save(self.actor, self.stage.checkpoints, updates, keep, wait=wait, metrics=self.metrics)

    def _read_step(self, first: int) -> list[Batch]:
        """Read the batches of a step: the updates from ``first`` that share a proximal policy.

        The current policy is the proximal one. A forward pass adds its log-probs to all batches but the first, whose
        own update starts from that policy anyway. Returns [] if a stop was asked for. Collective.
        """
        step: list[Batch] = []
        one_policy = self.recipe.schedule.one_policy  # else trainers wait for engines
        for update in range(first, min(self.total, first + self.step)):
            begun = time.perf_counter()
            groups = self.batches.read(update)
            if groups is None:
                return []  # no update of the step is made yet
            waited = {} if one_policy else {"idle_seconds": round(time.perf_counter() - begun, 4)}
            self.exporter.observe(groups)
            samples, micro_batches = pack(self.actor, groups)
            if step:
                micro_batches = with_proximal(self.actor, micro_batches)
            step.append((groups, ages(self.stage, update, groups) | waited, samples, micro_batches))
        return step

    def _make_one(self, update: int, batch: Batch, start: float) -> None:
        """Make an update and append its line of metrics. start: `time.perf_counter` when its groups were asked for."""
        groups, age, samples, micro_batches = batch
        line = {"stage": self.stage.number, "update": self.stage.first_update + update + 1} | age
        names: tuple[str, ...] = ("stage", "pass", "update", "staleness")
        place = {name: line[name] for name in names if name in line}
        values = self._train(samples, micro_batches, place)
        self.batches.trained(update + 1)
        if self.metrics:
            tokens = values.pop("sample_tokens", None)
            muted = tokens and tokens_by_group(tokens["counts"], samples, len(groups))
            by = by_columns(groups, self.recipe.metrics.by, muted)
            self.metrics.append(place | age | summary(groups) | by | values | throughput(samples, start))

    def _train(
        self, samples: list[Sample], micro_batches: list[packing.MicroBatch], place: dict[str, int]
    ) -> dict[str, Any]:
        actor, table = self.actor, self.recipe.metrics
        detail = table.detail > 0 and place["update"] % table.detail == 0
        try:
            torch.manual_seed(self.recipe.run.seed + place["update"])  # an objective of one's own may draw numbers
            lr, counted = actor.learning_rate(place["update"]), len(samples) if table.by else 0
            values = train_step(actor, micro_batches, self.objective, lr, detail, counted)
            if "muted_tokens" in values and parallel.reports_metrics():
                values["muted_tokens"] |= {"text": token_texts(values["muted_tokens"]["id"], self.recipe.model)}
            return values | lengths_by_sign(samples)
        except NonFiniteUpdate as error:
            return skip(actor, self.run, place, error, samples)


def pack(actor: Actor, groups: list[Group]) -> tuple[list[Sample], list[packing.MicroBatch]]:
    """The samples of ``groups``, and this rank's micro-batches of them."""
    recipe = actor.recipe
    samples = to_samples(groups, recipe.objective, recipe.actor.trains_recorded_experts)
    budget, share = recipe.actor.tokens_per_micro_batch, actor.models[0].shares_prompts
    return samples, packing.micro_batches(samples, budget, actor.device, share)


def _open_metrics(stage: Stage, start: Start) -> MetricsWriter | None:
    """The metrics writer, on the one rank that writes metrics; None if no update is left, so that later lines stay."""
    if not parallel.reports_metrics() or start.done == stage.run.recipe.schedule.updates_per_stage:
        return None
    done = stage.first_update + start.done
    lines = read_metrics(start.checkpoint, read_manifest(start.checkpoint)) if start.checkpoint and start.done else b""
    return MetricsWriter(stage.run.metrics, start.position, lines, done, stage.run.recipe.run)


class TooManySkipped(UserError):
    """Another update is not finite than the run may skip; the actor is as before it."""


def skip(
    actor: Actor, run: RunDir, place: dict[str, int], error: NonFiniteUpdate, samples: list[Sample]
) -> dict[str, float]:
    """Record an update that was skipped because loss or gradient is not finite; returns its metrics.

    The rank that writes metrics appends the offending sequences to non_finite.jsonl. `TooManySkipped`, on all ranks, if
    more updates would be skipped than ``actor.max_skipped_updates``.
    """
    if parallel.reports_metrics():
        for offender in error.offenders:
            if offender.sequence < len(samples):  # the dummy sequence of an empty micro-batch has a larger index
                append_json(run.non_finite, place | describe(offender, samples[offender.sequence]))
    if actor.skipped_updates >= actor.recipe.actor.max_skipped_updates:
        raise TooManySkipped(
            f"update {place['update']}: {error}. The offending sequences are in {run.non_finite}; no more updates can "
            f"be skipped with actor.max_skipped_updates = {actor.recipe.actor.max_skipped_updates}. To skip this one, "
            f"start the same command again with --set actor.max_skipped_updates={actor.skipped_updates + 1}"
        ) from error
    actor.skipped_updates += 1
    return {"skipped_update": 1.0}


def remove_checkpoints(run: RunDir, finished: int) -> None:
    """Remove the checkpoints of all but the last ``actor.keep_stages`` of the first ``finished`` stages."""
    keep = run.recipe.actor.keep_stages
    for number in reversed(range(max(0, finished - keep) if keep else 0)):
        checkpoints = run.stage(number).checkpoints
        if checkpoints.is_symlink() or not checkpoints.exists():
            return  # they belong to the run that this one branched from, or are gone, and so are those before them
        shutil.rmtree(checkpoints, ignore_errors=True)


@dataclass(frozen=True)
class Start:
    """Where the updates of a stage start or resume."""

    done: int = 0  # updates of the stage that are made already
    checkpoint: Path | None = None  # to load; None: start from the run's first policy
    position: Position = NOTHING  # place in metrics.jsonl at which new lines go


def find_start(stage: Stage, phase: str) -> Start:
    """Where ``phase`` resumes: after the newest undamaged checkpoint of ``stage``, or at its beginning. Collective.

    Damaged checkpoints are renamed. A stage at its beginning loads the last checkpoint of the previous stage, for
    the optimizer's state: `UserError` if that is damaged or gone.
    """
    first, total = dist.get_rank() == 0, stage.run.recipe.schedule.updates_per_stage
    if first:
        checkpoint.remove_unfinished(stage.checkpoints)
    # of rank 0, since other nodes may see an older state of a shared file system
    found = [[(done, path.name) for done, path in checkpoints(stage.checkpoints)] if first else None]
    dist.broadcast_object_list(found)
    for done, path in ((done, stage.checkpoints / name) for done, name in reversed(found[0] or [])):
        beat("verification", path.name)
        appears(path)
        damage = checkpoint.verify(path)
        if damage is None:
            if first:
                stage.log_event("resume", phase=phase, skipped=done, total=total, unit="updates")
            return Start(done, path, read_manifest(path).position)
        if first:
            place = {"checkpoint": str(path.relative_to(stage.run.root)), "kept_as": set_aside(path).name}
            stage.log_event("damaged_checkpoint", phase=phase, damage=damage, **place)
        dist.barrier()
    if stage.number == 0:
        other = stage.run.start()  # the checkpoint of another run, or None
        if other is not None and (damage := checkpoint.verify(other)):
            raise UserError(f"{other}, from which the run starts, is damaged: {damage}. Restore it from a copy")
        return Start(0, other)
    path = _end_of(stage.previous)
    # metrics.jsonl of a branch has only its own updates, none of the run whose checkpoints it links to
    position = NOTHING if stage.previous.checkpoints.is_symlink() else read_manifest(path).position
    return Start(0, path, position)


def _end_of(stage: Stage) -> Path:
    """The checkpoint after the last update of a stage; `UserError` if it is missing or damaged. Collective."""
    path = dict(checkpoints(stage.checkpoints)).get(stage.run.recipe.schedule.updates_per_stage)
    if path is not None and (damage := checkpoint.verify(path)) is None:
        return path
    found = f"{path} is damaged: {damage}" if path else f"{stage.checkpoints} lacks its last checkpoint"
    raise UserError(
        f"{found}. Restore it from a copy; or delete it, {stage.next.policy} and {stage.next.checkpoints}, and start "
        f"the run again: stage {stage.number} is then optimized again from its newest remaining checkpoint"
    )


def _objective(run: RunDir) -> Objective:
    return build_objective(run.recipe.objective.definition, run.recipe.objective.fields)
