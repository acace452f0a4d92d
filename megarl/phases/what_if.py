"""The what-if phase: compares every objective's gradient on stored batches with the gradient on fresh responses.

A single process holds an actor and the built-in engine. It loads policies of a stage one after another and makes no
update. `megarl.commands.what_if` starts it in a scratch run directory and reads the records that it writes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    """Carry out the request in the run directory; the answer has a record per policy, batch and objective."""
    request = stage.run.receive("request")
    recipe = stage.run.recipe
    device = parallel.initialize(recipe)
    actor = Actor.build(recipe, stage.run.base, device, load=False)
    actor.frozen = frozen_policies(build_objective(recipe.objective.definition, {}), stage)
    comparison = Comparison(stage, actor, RolloutStore(stage.rollouts), objectives_of(stage))
    total = len(request["updates"]) * len(request["batches"]) * (1 + len(comparison.objectives))
    found: list[dict[str, Any]] = []
    for updates in request["updates"]:
        for record in comparison.measure(updates, request["batches"]):
            found.append(record)
            stage.log_event("what_if_progress", done=len(found), total=total)
    comparison.close()
    stage.run.send("answer", records=found)


def objectives_of(stage: Stage) -> dict[str, Objective]:
    """{name: objective}: the recipe's objective with the recipe's settings, all others with their defaults.

    All aggregate losses as the recipe's objective does, and none has options such as a KL term, so that differences
    come from the objectives themselves.
    """
    table = stage.run.recipe.objective
    own = build_objective(table.definition, table.fields)
    found: dict[str, Objective] = {name: kind(aggregation=own.aggregation) for name, kind in OBJECTIVES.items()}
    return found | {table.name: own.objective if isinstance(own, WithOptions) else own}


@dataclass
class Comparison:
    """Computes gradients with an actor on stored batches of one stage and on fresh responses."""

    stage: Stage
    actor: Actor
    store: RolloutStore
    objectives: dict[str, Objective]
    _worker: RolloutWorker | None = None

    def measure(self, updates: int, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the record of each gradient of each of the ``batches``, given by their numbers, with one policy.

        updates: number of updates of the stage after which the policy is taken.

        Each objective's gradient on a stored batch is compared with the fresh gradient: that of GRPO on fresh responses
        of the same policy to the prompts of all batches together, since those of one batch would give mostly noise. As
        a measure of that noise, the fresh gradient of each batch is compared with that of all other batches.
        """
        load_policy(self.actor, self.stage, updates)
        grpo = replace(OBJECTIVES["grpo"](), aggregation=next(iter(self.objectives.values())).aggregation)
        stored = [self.store.read(self.stage.groups_of_update(self.store.chosen, batch)) for batch in batches]
        fresh = self._generate(updates, stored)
        beat("what if", f"the policy after update {updates}, fresh responses")
        on_policy = sum(self.gradient(groups, grpo)[0] for groups in fresh)
        assert isinstance(on_policy, torch.Tensor)
        for batch, groups, new in zip(batches, stored, fresh, strict=True):
            beat("what if", f"the policy after update {updates}, batch {batch}")
            place = {"update": updates, "batch": batch}
            own, _ = self.gradient(new, grpo)
            of_fresh = {"objective": FRESH, "norm": float(own.norm()), "cosine": cosine(own, on_policy - own)}
            yield place | of_fresh
            of_grpo, _ = self.gradient(groups, grpo)
            for name, objective in self.objectives.items():
                gradient, metrics = self.gradient(groups, objective)
                of_stored = {
                    "objective": name,
                    "kept": metrics["kept_fraction"],
                    "fractions": {metric: value for metric, value in metrics.items() if "_fraction" in metric},
                    "ess": metrics["ess"],
                    "norm": float(gradient.norm()),
                    "cosine": cosine(gradient, on_policy),
                    "cosine_to_grpo": cosine(gradient, of_grpo),
                }
                yield place | of_stored

    def gradient(self, groups: list[Group], objective: Objective) -> tuple[torch.Tensor, dict[str, Any]]:
        """The gradient of the whole batch before clipping, [parameters] float32, and the metrics of the batch."""
        beat("what if")
        _, micro_batches = pack(self.actor, groups)
        restore_biases = hold_biases(self.actor.models)
        _, metrics = compute_gradients(self.actor, micro_batches, objective)
        restore_biases()
        parts = [
            parameter.main_grad.detach().flatten()
            for replica in self.actor.replicas
            for parameter in replica.parameters()
            if parameter.requires_grad
        ]
        return torch.cat(parts).float(), metrics

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _generate(self, updates: int, stored: list[list[Group]]) -> list[list[Group]]:
        """Fresh responses to the prompts of each stored batch; the policy is exported unless the stage has it."""
        kept = {0: self.stage.policy, self.stage.run.recipe.schedule.updates_per_stage: self.stage.next.policy}
        policy = kept.get(updates)
        if policy is None or not policy.exists():
            policy = self.stage.run.root / f"policies/{updates:06d}"
            write_policy(self.actor, self.stage, updates, policy)
        if self._worker is None:
            self._worker = RolloutWorker.build(self.stage.run.recipe, self.stage.number, policy)
        else:
            self._worker.load(policy)
        worker = self._worker
        return [self._answer(worker, groups) for groups in stored]

    def _answer(self, worker: RolloutWorker, groups: list[Group]) -> list[Group]:
        """Fresh responses to the prompts of ``groups``, scored, sorted by group id."""
        chunks = [[group.group_id for group in groups], None]
        portions = worker.generate(
            lambda: chunks.pop(0), worker.prompts.train, worker.sampling(), other_seeds=OTHER_SEEDS
        )
        answered = [group for portion in portions for group in portion]
        return sorted(answered, key=lambda group: group.group_id)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The cosine of two vectors, computed in float64; None if one of them is 0."""
    wide, other = a.double(), b.double()
    norms = float(wide.norm() * other.norm())
    return float(wide @ other) / norms if norms else None
