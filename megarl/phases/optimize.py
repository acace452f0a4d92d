"""The optimize phase: all updates of a stage on its sealed rollouts; Megatron only."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch.distributed as dist

from megarl.actor import parallel
from megarl.advantages import group_advantages, zero_variance
from megarl.errors import STOPPED, UserError
from megarl.objectives import Objective, WithOptions, build_objective
from megarl.phases.stop import StopRequest
from megarl.recipe.tables import ObjectiveTable
from megarl.storage.json_lines import append_json
from megarl.storage.metrics_log import MetricsWriter
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import RunDir

if TYPE_CHECKING:
    import torch

    from megarl.actor.frozen import Field, FrozenPolicy
    from megarl.actor.nonfinite import NonFiniteUpdate, Offender
    from megarl.actor.packing import Sample
    from megarl.actor.step import Actor


class Batches(Protocol):
    """Where the updates of a stage get their groups from. ``update`` is one of the stage, from 0."""

    def read(self, update: int) -> list[Group] | None:
        """What the update trains; None when somebody asked to stop while it was waited for. Collective."""

    def trained(self, updates: int) -> None:
        """So many updates of the stage are made. Collective."""

    def metrics(self, update: int, groups: list[Group]) -> dict[str, Any]:
        """What metrics.jsonl says of the groups' age, ``staleness`` at least."""


@dataclass(frozen=True)
class SealedBatches:
    """The frozen rollouts of a staged run."""

    run: RunDir
    store: RolloutStore

    def read(self, update: int) -> list[Group]:
        return self.store.read(groups_of_update(self.run, self.store.chosen, update))

    def trained(self, updates: int) -> None: ...

    def metrics(self, update: int, groups: list[Group]) -> dict[str, Any]:
        return {"staleness": update}


def optimize(run: RunDir, stage: int) -> None:
    """Turn ``policy(stage)`` into ``policy(stage + 1)``, continuing from the newest checkpoint."""
    stop = StopRequest()
    if run.policy(stage + 1).exists():
        return  # a restart after a process that died between export and its end
    if not run.is_sealed(stage):
        raise UserError(f"{run.rollouts(stage)} is not sealed: run `megarl rollout {run.root} --stage {stage}` first")
    device = parallel.initialize(run.recipe)
    batches = SealedBatches(run, RolloutStore(run.rollouts(stage)))
    actor = build_actor(run, stage, device)
    make_updates(actor, run, stage, resume(actor, run, stage), batches, stop)


def build_actor(run: RunDir, stage: int, device: torch.device) -> Actor:
    """The actor with the policy that begins ``stage``, and the policies that it is compared with."""
    from megarl.actor import step  # only now does Megatron know the backend

    actor = step.Actor.build(run.recipe, run.policy(stage), device)
    actor.frozen = frozen_policies(_objective(run), run, stage)
    return actor


def make_updates(actor: Actor, run: RunDir, stage: int, done: int, batches: Batches, stop: StopRequest) -> None:
    """The updates of ``stage`` after the first ``done``, checkpoints on the way, and ``policy(stage + 1)``."""
    from megarl.actor import checkpoint

    recipe, schedule = run.recipe, run.recipe.schedule
    objective, saved = _objective(run), done
    before = stage * schedule.updates_per_stage  # updates of earlier stages
    metrics = MetricsWriter(run.metrics, before + done, recipe.run) if parallel.reports_metrics() else None
    if metrics and done:
        total = schedule.updates_per_stage
        run.log_event("resume", phase=_phase(run), stage=stage, skipped=done, total=total, unit="updates")

    for update in range(done, schedule.updates_per_stage):
        start = time.perf_counter()
        groups = batches.read(update)
        if groups is not None:
            ages = batches.metrics(update, groups)
            place = {"stage": stage, "update": before + update + 1, "staleness": ages["staleness"]}
            samples = to_samples(groups, recipe.objective, recipe.actor.routing_replay == "engine")
            values = _make_update(actor, run, samples, objective, place, metrics is not None)
            batches.trained(update + 1)
            if metrics:
                metrics.append(place | ages | summary(groups) | values | throughput(samples, start))
        updates = update + (groups is not None)
        last = updates == schedule.updates_per_stage
        stopping = groups is None or (not last and stop.agreed(actor.device))
        checkpoint.finish(actor, wait=False)
        if updates > saved and (updates % recipe.actor.checkpoint_every == 0 or last or stopping):
            if metrics:
                metrics.sync()
            directory, keep = run.checkpoints(stage), recipe.actor.keep_checkpoints
            checkpoint.save(actor, directory, updates, keep, wait=last or stopping)
            saved = updates
        if stopping:
            checkpoint.finish(actor)
            if metrics:
                metrics.close()
            sys.exit(STOPPED)
    export(actor, run, before + schedule.updates_per_stage, run.policy(stage + 1))
    if metrics:
        metrics.close()
        remove_stages(run, stage + 1)


def remove_stages(run: RunDir, finished: int) -> None:
    """The checkpoints of all but the last ``actor.keep_stages`` of so many finished stages."""
    keep = run.recipe.actor.keep_stages
    for stage in range(finished - keep if keep else 0):
        if not run.checkpoints(stage).is_symlink():  # those of the run that this one branched from
            shutil.rmtree(run.checkpoints(stage), ignore_errors=True)


def export(actor: Actor, run: RunDir, version: int, target: Path) -> None:
    """Write the policy behind which ``version`` updates of the run are. Collective."""
    from megarl.actor import hf, reference

    start, budget = time.perf_counter(), run.recipe.actor.tokens_per_micro_batch
    scores = reference.score(actor.models, hf.fixed_sequences(actor.models[0]), budget, actor.device)
    hf.export_hf(actor.models, target, run.policy(0), version, scores)
    if parallel.reports_metrics():
        policy, seconds = str(target.relative_to(run.root)), round(time.perf_counter() - start, 3)
        run.log_event("export", policy=policy, version=version, seconds=seconds)


def _objective(run: RunDir) -> Objective | WithOptions:
    return build_objective(run.recipe.objective.name, run.recipe.objective.fields)


def _phase(run: RunDir) -> str:
    return "live" if run.recipe.schedule.kind == "live" else "optimize"


def _make_update(
    actor: Actor,
    run: RunDir,
    samples: list[Sample],
    objective: Objective | WithOptions,
    place: dict[str, int],
    log: bool,
) -> dict[str, float]:
    from megarl.actor import packing, step
    from megarl.actor.nonfinite import NonFiniteUpdate

    micro_batches = packing.micro_batches(samples, run.recipe.actor.tokens_per_micro_batch, actor.device)
    try:
        return step.train_step(actor, micro_batches, objective, actor.learning_rate(place["update"]))
    except NonFiniteUpdate as error:
        return skip(actor, run, place, error, samples if log else None)


def skip(
    actor: Actor, run: RunDir, place: dict[str, int], error: NonFiniteUpdate, samples: list[Sample] | None
) -> dict[str, float]:
    """Metrics of an update that was left out, or `UserError`; with ``samples`` the offending ones are written out."""
    if samples is not None:
        for offender in error.offenders:
            if offender.sequence < len(samples):  # not the filler of an empty micro-batch
                append_json(run.non_finite, place | describe(offender, samples[offender.sequence]))
    actor.skipped_updates += 1
    if actor.skipped_updates > actor.recipe.actor.max_skipped_updates:
        raise UserError(
            f"update {place['update']}: {error}. The offending sequences are in {run.non_finite}; "
            f"actor.max_skipped_updates = {actor.recipe.actor.max_skipped_updates} allows no more of them"
        ) from error
    return {"skipped_update": 1.0}


def describe(offender: Offender, sample: Sample) -> dict[str, Any]:
    """A JSON object; positions count response tokens, numbers that are not finite are text."""
    shift = len(sample.prompt_tokens) - 1 if offender.whole_sequences else 0
    now = [offender.logprobs.get(i + shift, math.nan) for i in range(len(sample.response_tokens))]

    def numbers(values: Iterable[float]) -> list[float | str]:
        return [float(x) if math.isfinite(x) else str(float(x)) for x in values]

    return {
        "tensor": offender.tensor,
        "positions": [position - shift for position in offender.positions],
        "prompt_tokens": sample.prompt_tokens.tolist(),
        "response_tokens": sample.response_tokens.tolist(),
        "rollout_logprobs": numbers(sample.rollout_logprobs),
        "logprobs": numbers(now),
        "advantage": numbers([sample.advantage])[0],
    }


def frozen_policies(objective: Objective | WithOptions, run: RunDir, stage: int) -> list[FrozenPolicy]:
    """The policies an objective's options compare with, and the one whose routing is replayed: the run's first as
    KL reference, the stage's own recomputed."""
    from megarl.actor.frozen import FrozenPolicy

    options = objective.options if isinstance(objective, WithOptions) else ()
    wanted = {name for option in options for name in option.requires}
    frozen = []
    if "ref_logprobs" in wanted:
        frozen.append(FrozenPolicy.build(("ref_logprobs",), run.recipe, run.policy(0)))
    behaviour: list[Field] = ["old_logprobs"] if "old_logprobs" in wanted else []
    if run.recipe.actor.routing_replay == "actor":
        behaviour.append("routed_experts")
    if behaviour:
        frozen.append(FrozenPolicy.build(tuple(behaviour), run.recipe, run.policy(stage)))
    return frozen


def saved_updates(run: RunDir, stage: int) -> int:
    """Updates of ``stage`` that the newest checkpoint has."""
    from megarl.actor import checkpoint

    return max((update for update, _ in checkpoint.checkpoints(run.checkpoints(stage))), default=0)


def resume(actor: Actor, run: RunDir, stage: int) -> int:
    """Updates of ``stage`` that are done. A stage that begins takes optimizer and random state from the one before."""
    from megarl.actor import checkpoint

    if dist.get_rank() == 0:
        checkpoint.remove_unfinished(run.checkpoints(stage))
    own = checkpoint.checkpoints(run.checkpoints(stage))
    if own:
        return checkpoint.load(actor, own[-1][1])
    if stage > 0:
        earlier = checkpoint.checkpoints(run.checkpoints(stage - 1))
        if not earlier or earlier[-1][0] != run.recipe.schedule.updates_per_stage:
            raise UserError(f"{run.checkpoints(stage - 1)} lacks the last checkpoint of stage {stage - 1}")
        checkpoint.load(actor, earlier[-1][1])
    return 0


def groups_of_update(run: RunDir, groups: Sequence[int], update: int) -> Sequence[int]:
    """Of a stage's ``groups`` those of one update, counted from 0."""
    size = run.recipe.schedule.prompts_per_update
    return groups[update * size : (update + 1) * size]


def to_samples(groups: list[Group], table: ObjectiveTable, experts: bool = False) -> list[Sample]:
    """All responses of an update with their advantages; groups without variance stay or go as the recipe says.

    experts: with those that the engine recorded. `UserError` where it recorded none.
    """
    from megarl.actor.packing import Sample

    if experts:
        check_experts(groups)
    rewards = np.array([[response.reward for response in group.responses] for group in groups])
    advantages = group_advantages(rewards, table.advantage).tolist()
    keep = ~zero_variance(rewards).numpy() if table.zero_variance == "drop" else np.ones(len(groups), bool)
    samples = [
        Sample(
            prompt_tokens=group.prompt_tokens,
            response_tokens=response.tokens,
            rollout_logprobs=response.rollout_logprobs,
            advantage=advantage,
            trained=bool(kept),
            routed_experts=response.routed_experts if experts else None,
        )
        for group, row, kept in zip(groups, advantages, keep, strict=True)
        for response, advantage in zip(group.responses, row, strict=True)
    ]
    # a batch with nothing to learn from still makes an update, so that the schedule keeps its length
    return [sample for sample in samples if sample.trained] or samples[:1]


def check_experts(groups: list[Group]) -> None:
    for group in groups:
        if any(response.routed_experts is None for response in group.responses):
            raise UserError(
                f'[actor] routing_replay = "engine": group {group.group_id} has no routed experts, so it was generated '
                'under another recipe; use "actor" or "none"'
            )


def summary(groups: list[Group]) -> dict[str, float]:
    rewards = np.array([[response.reward for response in group.responses] for group in groups])
    responses = [response for group in groups for response in group.responses]
    return {
        "reward/mean": float(rewards.mean()),
        "zero_variance_fraction": float((rewards.min(1) == rewards.max(1)).mean()),
        "response_tokens/mean": float(np.mean([len(r.tokens) for r in responses])),
        "truncated_fraction": float(np.mean([r.finish_reason != "stop" for r in responses])),
    }


def throughput(samples: list[Sample], start: float) -> dict[str, Any]:
    """Of an update that began at ``start``, by `time.perf_counter`."""
    tokens, seconds = sum(map(len, samples)), time.perf_counter() - start
    return {"tokens": tokens, "seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1)}
