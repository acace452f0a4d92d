"""Policies that never change, for objectives that compare the current one with them, log-prob by log-prob."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
    """A second model in the actor's layout.

    fields: what it writes into micro-batches. "ref_logprobs": as reference of a KL term; "old_logprobs": as behaviour
    policy in the actor's own arithmetic; "routed_experts": the experts it chooses, for the actor to replay.
    """

    fields: tuple[Field, ...]
    models: list[PolicyModel]

    @classmethod
    def build(cls, fields: tuple[Field, ...], recipe: Recipe, policy_dir: Path) -> FrozenPolicy:
        models = build_model(read_hf_config(policy_dir), recipe)
        load_hf(models, policy_dir)
        for model in models:
            model.requires_grad_(False).eval()
        if "routed_experts" in fields:
            routing.install(models, replays=False)
        return cls(fields, models)

    def annotate(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with this policy's values in ``fields``. Collective over the pipeline."""
        plain = [replace(batch, routed_experts=None) for batch in micro_batches]
        routed: list[routing.Experts] = [{} for _ in micro_batches]
        logs = run_micro_batches(self.models, plain, collect, forward_only=True, routed=routed)
        values: list[dict[str, Any]] = [{} for _ in micro_batches]
        for name in self.fields:
            if name == "routed_experts":
                for value, experts in zip(values, routed, strict=True):
                    value[name] = experts
            elif logs:  # only the last pipeline stage computes log-probs
                for value, log in zip(values, logs, strict=True):
                    value[name] = log.batch.logprobs
        return [replace(batch, **value) for batch, value in zip(micro_batches, values, strict=True)]
