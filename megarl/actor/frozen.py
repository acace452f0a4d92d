"""Policies with fixed weights, whose log-probs or choices of experts the update of the current policy needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megarl.actor import routing
from megarl.actor.hf import load_hf
from megarl.actor.model import PolicyModel, build_model
from megarl.actor.packing import MicroBatch
from megarl.actor.schedule import collect, run_micro_batches
from megarl.models.hf_config import read_hf_config
from megarl.recipe.tables import Recipe

Field = Literal["ref_logprobs", "old_logprobs", "routed_experts"]


@dataclass
class FrozenPolicy:
    """A second model, without an optimizer, in the actor's layout.

    fields: what `annotate` writes into micro-batches. "ref_logprobs": its log-probs, as the reference of a KL term;
    "old_logprobs": its log-probs, as those of the behaviour policy computed by the trainer instead of the engine, with
    the experts that the engine recorded, if the actor replays those; "routed_experts": the experts that it chooses, for
    the actor to replay.
    """

    fields: tuple[Field, ...]
    models: list[PolicyModel]

    @classmethod
    def build(cls, fields: tuple[Field, ...], recipe: Recipe, policy_dir: Path) -> FrozenPolicy:
        models = build_model(read_hf_config(policy_dir), recipe)
        load_hf(models, policy_dir)
        for model in models:
            model.requires_grad_(False).eval()
        routing.install(models)
        return cls(fields, models)

    def annotate(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with this policy's values in ``fields``. Collective over the pipeline."""
        given = micro_batches
        if "old_logprobs" not in self.fields:  # the engine recorded what another policy chose
            given = [replace(micro, routed_experts=None) for micro in micro_batches]
        routed: list[routing.Experts] = [{} for _ in micro_batches]
        logs = run_micro_batches(self.models, given, collect, forward_only=True, routed=routed)
        if "routed_experts" in self.fields:
            micro_batches = [replace(m, routed_experts=r) for m, r in zip(micro_batches, routed, strict=True)]
        names = [name for name in self.fields if name != "routed_experts"]
        if not logs:  # only the last pipeline stage computes log-probs
            return micro_batches
        return [
            replace(micro, batch=replace(micro.batch, **dict.fromkeys(names, log.batch.logprobs)))  # type: ignore[arg-type]
            for micro, log in zip(micro_batches, logs, strict=True)
        ]
