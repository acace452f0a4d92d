"""The what-if phase: compares every objective's gradient on stored batches with the gradient on fresh responses.

A single process holds an actor and the built-in engine. It loads policies of a stage one after another and makes no
update. `megarl.commands.what_if` starts it in a scratch run directory and reads the records that it writes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megarl.actor import parallel
from megarl.actor.routing import hold_biases
from megarl.actor.step import Actor, compute_gradients
from megarl.heartbeats import beat
from megarl.objectives import OBJECTIVES, Objective, WithOptions, build_objective
from megarl.phases.export import load_policy, write_policy
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.updates import frozen_policies, pack
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import Stage

FRESH = "fresh"  # stands in the place of an objective's name in records about fresh responses
OTHER_SEEDS = 1 << 40  # added to a group's number, so that its fresh responses have other seeds than the stored ones


def what_if(stage: Stage) -> None:
    """Carry out the request in the run directory; the answer has a record per policy, batch and objective.

    Each objective's gradient on a stored batch is compared with the fresh gradient: that of GRPO on fresh responses of
    the same policy to the prompts of all batches together, since those of one batch would give mostly noise. As a
    measure of that noise, the fresh gradient of each batch is compared with that of all other batches.
    """
    request, recipe = stage.run.read_request(), stage.run.recipe
    device = parallel.initialize(recipe)
    actor = Actor.build(recipe, stage.run.base, device, load=False)
    actor.frozen = frozen_policies(build_objective(recipe.objective.definition, {}), stage)
    objectives, store = objectives_of(stage), RolloutStore(stage.rollouts)
    stored = {batch: store.read(stage.groups_of_update(store.chosen, batch)) for batch in request["batches"]}
    total = len(request["updates"]) * len(stored) * (1 + len(objectives))
    found: list[dict[str, Any]] = []
    worker: RolloutWorker | None = None
    for updates in request["updates"]:
        load_policy(actor, stage, updates)
        worker = _with_policy(worker, actor, stage, updates)
        for record in _compare(actor, objectives, stored, _answers(worker, stored)):
            found.append({"update": updates} | record)
            stage.log_event("what_if_progress", done=len(found), total=total)
    if worker is not None:
        worker.close()
    stage.run.write_answer(found)


def objectives_of(stage: Stage) -> dict[str, Objective]:
    """{name: objective}: the recipe's objective with the recipe's settings, all others with their defaults.

    All aggregate losses as the recipe's objective does, and none has options such as a KL term, so that differences
    come from the objectives themselves.
    """
    table = stage.run.recipe.objective
    own = build_objective(table.definition, table.fields)
    found: dict[str, Objective] = {name: kind(aggregation=own.aggregation) for name, kind in OBJECTIVES.items()}
    return found | {table.name: own.objective if isinstance(own, WithOptions) else own}


def _with_policy(worker: RolloutWorker | None, actor: Actor, stage: Stage, updates: int) -> RolloutWorker:
    """``worker``, or a new one, with the policy after ``updates``, which is exported unless the stage has it."""
    kept = {0: stage.policy, stage.run.recipe.schedule.updates_per_stage: stage.next.policy}
    policy = kept.get(updates)
    if policy is None or not policy.exists():
        policy = stage.run.root / f"policies/{updates:06d}"
        write_policy(actor, stage, updates, policy)
    if worker is None:
        return RolloutWorker(stage.run.recipe, stage.number, policy)
    worker.load(policy)
    return worker


def _answers(worker: RolloutWorker, stored: dict[int, list[Group]]) -> dict[int, list[Group]]:
    """Fresh responses to the prompts of each stored batch."""
    chunks = [*([group.group_id for group in groups] for groups in stored.values()), None]
    prompt, draws = worker.prompts.train, worker.sampling()
    portions = worker.generate(lambda: chunks.pop(0), prompt, draws, other_seeds=OTHER_SEEDS)
    fresh = {group.group_id: group for portion in portions for group in portion}
    return {batch: [fresh[group.group_id] for group in groups] for batch, groups in stored.items()}


def _compare(
    actor: Actor, objectives: dict[str, Objective], stored: dict[int, list[Group]], fresh: dict[int, list[Group]]
) -> Iterator[dict[str, Any]]:
    """Yield the record of each gradient of each batch with the policy that the actor has."""
    grpo = replace(OBJECTIVES["grpo"](), aggregation=next(iter(objectives.values())).aggregation)
    beat("what if", "fresh responses")
    on_policy = sum(gradient(actor, groups, grpo)[0] for groups in fresh.values())
    assert isinstance(on_policy, torch.Tensor)
    for batch, groups in stored.items():
        beat("what if", f"batch {batch}")
        own, _ = gradient(actor, fresh[batch], grpo)
        of_fresh = {"objective": FRESH, "norm": float(own.norm()), "cosine": cosine(own, on_policy - own)}
        yield {"batch": batch} | of_fresh
        of_grpo, _ = gradient(actor, groups, grpo)
        for name, objective in objectives.items():
            found, metrics = gradient(actor, groups, objective)
            yield {
                "batch": batch,
                "objective": name,
                "kept": metrics["kept_fraction"],
                "fractions": {metric: value for metric, value in metrics.items() if "_fraction" in metric},
                "ess": metrics["ess"],
                "norm": float(found.norm()),
                "cosine": cosine(found, on_policy),
                "cosine_to_grpo": cosine(found, of_grpo),
            }


def gradient(actor: Actor, groups: list[Group], objective: Objective) -> tuple[torch.Tensor, dict[str, Any]]:
    """The gradient of the whole batch before clipping, [parameters] float32, and the metrics of the batch."""
    beat("what if")
    _, micro_batches = pack(actor, groups)
    restore_biases = hold_biases(actor.models)
    _, metrics = compute_gradients(actor, micro_batches, objective)
    restore_biases()
    replicas = actor.replicas
    parts = [p.main_grad.detach().flatten() for part in replicas for p in part.parameters() if p.requires_grad]
    return torch.cat(parts).float(), metrics


def cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The cosine of two vectors, computed in float64; None if one of them is 0."""
    wide, other = a.double(), b.double()
    norms = float(wide.norm() * other.norm())
    return float(wide @ other) / norms if norms else None
