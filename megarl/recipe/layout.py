"""Which parallel layouts a model can have.

Megatron checks some of these rules only after all processes have started, and others not at all: it then trains
wrongly without an error. Here they are checked by arithmetic before any process starts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megarl.errors import UserError
from megarl.recipe.tables import Recipe

# settings of TransformerConfig that megarl derives itself, and what to set instead
_OWNED = {
    "tensor_model_parallel_size": "[actor] tensor_parallel",
    "pipeline_model_parallel_size": "[actor] pipeline_parallel",
    "context_parallel_size": "[actor] context_parallel",
    "expert_model_parallel_size": "[actor] expert_parallel",
    "expert_tensor_parallel_size": "[actor] expert_tensor_parallel",
    "sequence_parallel": "[actor] tensor_parallel, which implies it",
    "variable_seq_lengths": "neither value, it follows from the pipeline schedule",
    # alternatives to the two settings of `_ENDS`
    **dict.fromkeys(
        (
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    ),
}
# field of `Layout` -> key of ``[megatron]``: the layers of the first and the last pipeline stage, if they differ
_ENDS = {
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
}
# key of ``[megatron]`` -> the only value that gives a correct loss, and why
_REQUIRED = {
    "calculate_per_token_loss": (True, "micro-batches and ranks would be averaged with wrong weights"),
    "moe_token_dispatcher_type": ("alltoall", "no other supports micro-batches of several lengths"),
    "batch_p2p_comm": (False, "virtual pipeline stages could receive each other's messages without an error"),
}

# fields of `Layout` and keys of ``[actor]``: the ranks among which the model is divided
PARALLEL = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel")
# tables that do not affect rollouts: the same rollouts can be trained with other values
TRAINING_TABLES = ("objective.", "optimizer.", "actor.", "megatron.", "megatron_ddp.", "megatron_optimizer.")
# settings that keep the rollouts but divide them into other batches
BATCHES = ("schedule.prompts_per_update", "schedule.passes", "schedule.updates_per_stage")

# settings that decide where things are computed and what is kept, but not the result: a run may change them midway
LAYOUT_SETTINGS = (
    "actor.processes_per_node",
    *(f"actor.{name}" for name in PARALLEL),
    "megatron.virtual_pipeline_model_parallel_size",
    *(f"megatron.{name}" for name in _ENDS.values()),
    "rollout.workers",
    "rollout.tensor_parallel",
    "rollout.memory_fraction",
    "rollout.groups_per_chunk",
    "rollout.sglang_python",
    "actor.tokens_per_micro_batch",
    "actor.recompute",
    "actor.checkpoint_every",
    "actor.keep_checkpoints",
    "actor.keep_stages",
    "actor.keep_policies",
    "actor.max_skipped_updates",
    "run.rehearse",
    "run.max_restarts",
    "run.stall_seconds",
    "run.tensorboard",
    "run.wandb",
    "run.mlflow",
)
_STAGE_LAYOUT = re.compile(r"stages\.\d+\.(workers|tensor_parallel|memory_fraction)")


def is_layout_setting(name: str) -> bool:
    """Whether a run may be continued with another value of this ``section.key``."""
    return name in LAYOUT_SETTINGS or _STAGE_LAYOUT.fullmatch(name) is not None


@dataclass(frozen=True)
class Layout:
    """The number of ranks and how the model is divided among them; fields are named as in ``[actor]``."""

    ranks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    virtual_stages: int = 1  # model chunks of each pipeline rank
    first_layers: int = 0  # layers of the first pipeline stage; 0: as many as the stages between first and last
    last_layers: int = 0  # the same of the last one

    @classmethod
    def of(cls, recipe: Recipe, ranks: int) -> Layout:
        """The layout that a recipe asks for on ``ranks`` processes."""
        actor = recipe.actor
        return cls(
            ranks,
            actor.tensor_parallel,
            actor.pipeline_parallel,
            actor.context_parallel,
            actor.expert_parallel,
            actor.expert_tensor_parallel or actor.tensor_parallel,
            recipe.virtual_pipeline_stages or 1,
            *(recipe.megatron.get(name, 0) for name in _ENDS.values()),
        )

    @property
    def data_parallel(self) -> int:
        """Replicas of the weights outside experts."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def expert_data_parallel(self) -> int:
        """Replicas of the experts' weights."""
        return self.ranks // (self.expert_parallel * self.expert_tensor_parallel * self.pipeline_parallel)

    def stage_layers(self, layers: int) -> list[int]:
        """How many of a model's ``layers`` each pipeline stage has.

        The stages between the first and the last get equal shares, rounded down; `problems` reports a remainder.
        """
        ends = self.first_layers, self.last_layers
        between = self.pipeline_parallel - sum(size > 0 for size in ends)
        each = (layers - sum(ends)) // between if between > 0 else 0
        if self.pipeline_parallel == 1:
            return [layers]
        return [ends[0] or each, *[each] * (self.pipeline_parallel - 2), ends[1] or each]

    def chunks(self, layers: int) -> list[range]:
        """The layers, counted from 0, of each model chunk: a pipeline stage, or one of its virtual stages."""
        sizes = [size // self.virtual_stages for size in self.stage_layers(layers)] * self.virtual_stages
        ends = list(itertools.accumulate(sizes))
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def layers_of_stage(self, stage: int, layers: int) -> list[int]:
        """The layers, counted from 0, of all model chunks of a pipeline rank."""
        return [layer for chunk in self.chunks(layers)[stage :: self.pipeline_parallel] for layer in chunk]

    def balanced(self, layers: int) -> Layout:
        """This layout with stages as equal as possible even if ``pipeline_parallel`` does not divide the layers.

        The first and the last stage then have fewer layers than the others: the first has the most micro-batches in
        flight, and the last has the head. With too few layers for that, the stages are left unequal to `problems`.
        """
        stages = self.pipeline_parallel
        left = layers - (stages - 2) * -(-layers // stages)
        if layers % stages == 0 or self.virtual_stages > 1 or left < 2:
            return replace(self, first_layers=0, last_layers=0)
        return replace(self, first_layers=left // 2, last_layers=left - left // 2)

    def problems(self, hf: dict[str, Any]) -> Iterator[str]:
        """Describe every rule that the layout breaks for a model; ``hf``: its configuration, from `read_hf_config`."""
        for key, size in hf["divided"].items():
            if size % self.tensor_parallel:
                yield f"tensor_parallel = {self.tensor_parallel} does not divide the model's {key} = {size}"
        heads = self.tensor_parallel * self.context_parallel
        for key, size in hf["context_divided"].items():
            if size % heads and not size % self.tensor_parallel:
                yield f"tensor_parallel * context_parallel = {heads} does not divide the model's {key} = {size}"
        yield from self._problems_of_stages(hf["num_hidden_layers"])
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            yield f"virtual_pipeline_model_parallel_size = {self.virtual_stages} needs pipeline_parallel > 1"
        experts = hf["num_experts"]
        if (experts or 1) % self.expert_parallel:
            yield f"expert_parallel = {self.expert_parallel} does not divide the model's {experts or 'no'} experts"
        width, name = (hf["moe_intermediate_size"], "moe_intermediate_size") if experts else (0, "")
        if width % self.expert_tensor_parallel:
            yield f"expert_tensor_parallel = {self.expert_tensor_parallel} does not divide the model's {name} = {width}"
        if self.expert_tensor_parallel > 1 and hf.get("undivided_experts"):
            yield (
                f"expert_tensor_parallel = {self.expert_tensor_parallel}: this model's experts have biases and cannot "
                "be divided, so it must be 1"
            )
        if experts and self.expert_parallel == 1 and self.expert_tensor_parallel != self.tensor_parallel:
            yield (
                f"expert_parallel = 1 with expert_tensor_parallel = {self.expert_tensor_parallel} and "
                f"tensor_parallel = {self.tensor_parallel}: Megatron-Core would leave the gradients of experts "
                "unreduced; the two must be equal"
            )
        for names in (
            ("tensor_parallel", "pipeline_parallel", "context_parallel"),
            ("expert_tensor_parallel", "expert_parallel", "pipeline_parallel"),
        ):
            product = math.prod(getattr(self, n) for n in names)
            if self.ranks % product and (experts or "expert_parallel" not in names):
                yield f"processes_per_node * nodes = {self.ranks} is not a multiple of {' * '.join(names)} = {product}"

    def _problems_of_stages(self, layers: int) -> Iterator[str]:
        given = {name: getattr(self, field) for field, name in _ENDS.items() if getattr(self, field)}
        if not given:
            stages = self.pipeline_parallel * self.virtual_stages
            if layers % stages:
                times = " * virtual_pipeline_model_parallel_size" if self.virtual_stages > 1 else ""
                even = self.balanced(layers)
                ends = " and ".join(f"{name} = {getattr(even, field)}" for field, name in _ENDS.items())
                hint = f"; set [megatron] {ends}" if even.first_layers else ""
                wrong = f"pipeline_parallel{times} = {stages} does not divide the model's num_hidden_layers = {layers}"
                yield wrong + hint
            return
        said = " and ".join(f"{name} = {size}" for name, size in given.items())
        sizes = self.stage_layers(layers)
        if self.pipeline_parallel == 1:
            yield f"{said}: pipeline_parallel = 1 makes only one stage; set it higher, or leave this setting out"
        elif sum(sizes) != layers or min(sizes) < 1:
            yield (
                f"{said}: the other {self.pipeline_parallel - len(given)} pipeline stages cannot share the rest of the "
                f"model's num_hidden_layers = {layers} evenly"
            )
        elif any(size % self.virtual_stages for size in sizes):
            yield (
                f"virtual_pipeline_model_parallel_size = {self.virtual_stages} does not divide the layers of every "
                f"pipeline stage, {', '.join(map(str, sizes))}"
            )
        elif self.virtual_stages > 1 and len(given) == self.pipeline_parallel:
            # Megatron-Core 0.16.1 would divide by the number of stages between them, which is 0
            yield f"{said}: with virtual stages on two pipeline ranks set only num_layers_in_first_pipeline_stage"


def check_layout(recipe: Recipe, hf: dict[str, Any], nodes: int | None = 1) -> None:
    """Raise `UserError` with the rule that is broken if Megatron would refuse a layout or compute wrongly in it.

    hf: the model's configuration, from `read_hf_config`. nodes: None if their number is not known yet; then it is not
    checked.
    """
    for key, owner in _OWNED.items():
        if key in recipe.megatron:
            raise UserError(f"[megatron] {key} = {recipe.megatron[key]!r}: use {owner}")
    for key, (only, reason) in _REQUIRED.items():
        if recipe.megatron.get(key, only) != only:
            raise UserError(f"[megatron] {key} = {recipe.megatron[key]!r}: {reason}")
    for key in _ENDS.values():
        if recipe.megatron.get(key, 1) < 1:
            raise UserError(f"[megatron] {key} = {recipe.megatron[key]}: must be at least 1")
    _check_routing(recipe, hf)
    layout = Layout.of(recipe, (nodes or 1) * recipe.actor.processes_per_node)
    if nodes is None:
        layout = replace(layout, ranks=math.prod(getattr(layout, name) for name in PARALLEL))
    if (problem := next(layout.problems(hf), None)) is not None:
        raise UserError(f"[actor] {problem}")


def _check_routing(recipe: Recipe, hf: dict[str, Any]) -> None:
    replay = recipe.actor.routing_replay
    if recipe.megatron.get("moe_router_bias_update_rate") and (replay != "none" or recipe.virtual_pipeline_stages):
        what = f"the experts that [actor] routing_replay = {replay!r} gives, which no bias changes"
        if replay == "none":
            what = "the tokens that fill micro-batches up under virtual_pipeline_model_parallel_size"
        raise UserError(f"[megatron] moe_router_bias_update_rate would count {what}: leave one of them out")
    if replay == "none":
        return
    if not hf["num_experts"]:
        raise UserError(f"[actor] routing_replay = {replay!r}: this model has no experts")
    if recipe.megatron.get("moe_router_fusion"):
        raise UserError(
            f"[megatron] moe_router_fusion = true chooses experts in a fused kernel, which [actor] routing_replay = "
            f"{replay!r} cannot override: leave one of them out"
        )
