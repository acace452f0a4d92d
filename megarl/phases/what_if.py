"""The what-if phase: gradients of every objective on stored batches, beside those of fresh responses.

One process holds an actor and the built-in engine, takes the policies of a stage one after another, and makes no
update. `megarl.what_if` starts it in a scratch run directory, and reads what it writes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.actor import packing, parallel
from megarl.actor.step import Actor, compute_gradients
from megarl.beats import beat
from megarl.objectives import OBJECTIVES, Objective, build_objective
from megarl.phases.export import load_policy, write_policy
from megarl.phases.generation import generate
from megarl.phases.rollout_worker import Draws, RolloutWorker
from megarl.phases.samples import to_samples
from megarl.phases.scoring import SeededPrompt
from megarl.phases.updates import frozen_policies
from megarl.storage.requests import read_request, write_answer
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import Stage

FRESH = "fresh"  # the name of what is no objective on stored responses
OTHER_SEEDS = 1 << 40  # added to a group's number: responses to the same prompt with other seeds
MUTED = {"clipped": "clip_fraction", "vetoed": "veto_fraction", "masked": "m2_mask_fraction"}  # shares of the tokens


def what_if(stage: Stage) -> None:
    """Answer the request: a record a policy, batch and objective."""
    request = read_request(stage.run.root)
    recipe = stage.run.recipe
    device = parallel.initialize(recipe)
    actor = Actor.build(recipe, stage.run.base, device, load=False)
    actor.frozen = frozen_policies(build_objective(recipe.objective.name, {}), stage)
    comparison = Comparison(stage, actor, RolloutStore(stage.rollouts), objectives_of(stage))
    found = [record for updates in request["updates"] for record in comparison.measure(updates, request["batches"])]
    comparison.close()
    write_answer(stage.run.root, found)


def objectives_of(stage: Stage) -> dict[str, Objective]:
    """Every objective with its own defaults, the run's with the recipe's settings, and all with its aggregation.

    Without options such as a KL term, so that differences are the objectives'.
    """
    table = stage.run.recipe.objective
    names = {name: {} if name != table.name else table.fields for name in OBJECTIVES}
    own = build_objective(table.name, table.fields).aggregation
    found = {}
    for name, kind in OBJECTIVES.items():
        fields = {key: value for key, value in names[name].items() if key in kind.__dataclass_fields__}
        built = build_objective(name, fields | {"aggregation": own})
        assert isinstance(built, Objective)
        found[name] = built
    return found


@dataclass
class Comparison:
    """An actor, an engine and stored batches of one stage."""

    stage: Stage
    actor: Actor
    store: RolloutStore
    objectives: dict[str, Objective]
    _worker: RolloutWorker | None = None

    def measure(self, updates: int, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The policy after so many ``updates`` of the stage, on the stored batches of those numbers.

        Fresh is GRPO's gradient on new responses of the policy to the same prompts, those of all batches together: of
        one batch it would be mostly noise. The fresh gradient of a batch is compared with that of the others.
        """
        worker = self._load(updates)
        grpo = replace(OBJECTIVES["grpo"](), aggregation=next(iter(self.objectives.values())).aggregation)
        stored = [self.store.read(self.stage.groups_of_update(self.store.chosen, batch)) for batch in batches]
        fresh = [self._answer(worker, groups) for groups in stored]
        on_policy = sum(self.gradient(groups, grpo)[0] for groups in fresh)
        assert isinstance(on_policy, torch.Tensor)
        for batch, groups, new in zip(batches, stored, fresh, strict=True):
            beat("what if", f"the policy after update {updates}, batch {batch}")
            place = {"update": updates, "batch": batch}
            own, _ = self.gradient(new, grpo)
            yield place | {"objective": FRESH, "norm": float(own.norm()), "cosine": cosine(own, on_policy - own)}
            of_grpo, _ = self.gradient(groups, grpo)
            for name, objective in self.objectives.items():
                gradient, metrics = self.gradient(groups, objective)
                yield place | {
                    "objective": name,
                    "kept": metrics["kept_fraction"],
                    **{column: metrics[metric] for column, metric in MUTED.items() if metric in metrics},
                    "ess": metrics["ess"],
                    "norm": float(gradient.norm()),
                    "cosine": cosine(gradient, on_policy),
                    "cosine_to_grpo": cosine(gradient, of_grpo),
                }

    def gradient(self, groups: list[Group], objective: Objective) -> tuple[torch.Tensor, dict[str, Any]]:
        """[parameters] float32, of the whole batch, before clipping; and the metrics of the batch."""
        recipe = self.actor.recipe
        samples = to_samples(groups, recipe.objective, recipe.actor.routing_replay == "engine")
        micro_batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, self.actor.device)
        _, metrics = compute_gradients(self.actor, micro_batches, objective)
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

    def _load(self, updates: int) -> RolloutWorker:
        """The policy after so many updates of the stage, into actor and engine."""
        stage, policy = self.stage, self.stage.policy
        load_policy(self.actor, stage, updates)
        if updates:
            policy = stage.run.root / f"policies/{updates:06d}"
            write_policy(self.actor, stage, updates, policy)
        if self._worker is None:
            self._worker = RolloutWorker.build(stage.run.recipe, stage.number, policy)
        else:
            self._worker.load(policy)
        return self._worker

    def _answer(self, worker: RolloutWorker, groups: list[Group]) -> list[Group]:
        """New responses of the policy to the prompts of ``groups``, scored."""
        table = self.stage.run.recipe.rollout
        draws = Draws(table.responses_per_prompt, table.temperature, table.max_response_tokens)

        def prompt(group: int) -> SeededPrompt:
            return SeededPrompt(OTHER_SEEDS + group, worker.prompts.train(group))

        portions = generate(worker, iter([[group.group_id for group in groups]]), prompt, draws)
        answered = [group for portion in portions for group in portion]
        return sorted(answered, key=lambda group: group.group_id)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Of two vectors, summed in float64; None where one is 0."""
    wide, other = a.double(), b.double()
    norms = float(wide.norm() * other.norm())
    return float(wide @ other) / norms if norms else None
