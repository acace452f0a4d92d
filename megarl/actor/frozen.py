"""Policies that never change, for objectives that compare the current one with them, log-prob by log-prob."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megarl.actor.hf import load_hf
from megarl.actor.model import PolicyModel, build_model
from megarl.actor.packing import MicroBatch
from megarl.actor.schedule import collect, run_micro_batches
from megarl.config import Recipe
from megarl.hf_config import read_hf_config


@dataclass
class FrozenPolicy:
    """A second model in the actor's layout.

    field: "ref_logprobs", the reference of a KL term, or "old_logprobs", the behaviour policy as the actor computes it.
    """

    field: Literal["ref_logprobs", "old_logprobs"]
    models: list[PolicyModel]

    @classmethod
    def build(cls, field: Literal["ref_logprobs", "old_logprobs"], recipe: Recipe, policy_dir: Path) -> FrozenPolicy:
        models = build_model(read_hf_config(policy_dir), recipe)
        load_hf(models, policy_dir)
        for model in models:
            model.requires_grad_(False).eval()
        return cls(field, models)

    def annotate(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with this policy's log-probs in ``field``. Collective over the pipeline."""
        logs = run_micro_batches(self.models, micro_batches, collect, forward_only=True)
        if not logs:
            return micro_batches  # only the last pipeline stage computes a loss
        values: list[dict[str, Any]] = [{self.field: log.batch.logprobs} for log in logs]
        return [replace(batch, **value) for batch, value in zip(micro_batches, values, strict=True)]
