"""Which parallel layouts a model can have, and the nearest valid one where the requested one is not.

Megatron checks some of these rules only after all processes have started, and others not at all: it then trains
wrongly without an error. Here they are checked by arithmetic before any process starts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.errors import UserError
from megarl.recipe.tables import Recipe

# settings of TransformerConfig that follow from [actor], and those without which megarl's loss would be wrong
_OWNED = {
    "tensor_model_parallel_size": "[actor] tensor_parallel",
    "pipeline_model_parallel_size": "[actor] pipeline_parallel",
    "context_parallel_size": "[actor] context_parallel",
    "expert_model_parallel_size": "[actor] expert_parallel",
    "expert_tensor_parallel_size": "[actor] expert_tensor_parallel",
    "sequence_parallel": "[actor] tensor_parallel, which implies it",
    "variable_seq_lengths": "neither value, it follows from the pipeline schedule",
}
_REQUIRED = {
    "calculate_per_token_loss": (True, "micro-batches and ranks would be averaged with wrong weights"),
    "batch_p2p_comm": (False, "messages between virtual pipeline stages would cross without a word"),
}

# tables that leave the rollouts as they are: the same rollouts can be trained with others
TRAINING_TABLES = ("objective.", "optimizer.", "actor.", "megatron.", "megatron_ddp.", "megatron_optimizer.")

# settings that decide where things are computed and what is kept, but not the result: a run may change them midway
LAYOUT_SETTINGS = (
    "actor.processes_per_node",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.context_parallel",
    "actor.expert_parallel",
    "actor.expert_tensor_parallel",
    "megatron.virtual_pipeline_model_parallel_size",
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
    "run.rehearse",
    "run.max_restarts",
    "run.stall_seconds",
    "run.tensorboard",
    "run.wandb",
    "run.mlflow",
)
_STAGE_LAYOUT = re.compile(r"stages\.\d+\.(workers|tensor_parallel|memory_fraction)")
# cost of changing a factor in the search for the nearest layout: these cut every layer, the others only experts
_WEIGHT = {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2}


def is_layout_setting(name: str) -> bool:
    """Whether a run may be continued with another value of this ``section.key``."""
    return name in LAYOUT_SETTINGS or _STAGE_LAYOUT.fullmatch(name) is not None


@dataclass(frozen=True)
class Layout:
    """The number of ranks and how the model is divided among them; names as in ``[actor]``."""

    ranks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    virtual_stages: int = 1  # of each pipeline rank

    @classmethod
    def of(cls, recipe: Recipe, ranks: int) -> Layout:
        actor = recipe.actor
        return cls(
            ranks,
            actor.tensor_parallel,
            actor.pipeline_parallel,
            actor.context_parallel,
            actor.expert_parallel,
            actor.expert_tensor_parallel or actor.tensor_parallel,
            recipe.virtual_pipeline_stages or 1,
        )

    def problems(self, hf: dict[str, Any]) -> Iterator[str]:
        """Every rule that the layout breaks for a model (`megarl.models.hf_config.read_hf_config`)."""
        for key, size in hf["divided"].items():
            if size % self.tensor_parallel:
                yield f"tensor_parallel = {self.tensor_parallel} does not divide the model's {key} = {size}"
        heads = self.tensor_parallel * self.context_parallel
        for key, size in hf["context_divided"].items():
            if size % heads and not size % self.tensor_parallel:
                yield f"tensor_parallel * context_parallel = {heads} does not divide the model's {key} = {size}"
        stages = self.pipeline_parallel * self.virtual_stages
        if hf["num_hidden_layers"] % stages:
            times = " * virtual_pipeline_model_parallel_size" if self.virtual_stages > 1 else ""
            yield (
                f"pipeline_parallel{times} = {stages} does not divide the model's "
                f"num_hidden_layers = {hf['num_hidden_layers']}"
            )
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
                f"expert_tensor_parallel = {self.expert_tensor_parallel}: experts with biases are not divided, so it "
                "must be 1"
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
                yield f"processes_per_node * nodes = {self.ranks} is no multiple of {' * '.join(names)} = {product}"

    def nearest(self, hf: dict[str, Any]) -> Layout | None:
        """The valid layout on the same ranks that differs least from this one; None if there is none."""
        sizes = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0]
        best: tuple[float, Layout] | None = None
        for tensor, pipeline, context in itertools.product(sizes, repeat=3):
            if self.ranks % (tensor * pipeline * context):
                continue
            for expert, expert_tensor in itertools.product(sizes, repeat=2) if hf["num_experts"] else [(1, tensor)]:
                for virtual in {1, self.virtual_stages}:
                    layout = Layout(self.ranks, tensor, pipeline, context, expert, expert_tensor, virtual)
                    distance = self._distance(layout)
                    if (best is None or distance < best[0]) and not any(layout.problems(hf)):
                        best = distance, layout
        return best[1] if best else None

    def _distance(self, other: Layout) -> float:
        mine, theirs = asdict(self), asdict(other)
        return sum(_WEIGHT.get(key, 1) * abs(math.log2(theirs[key] / size)) for key, size in mine.items())

    def changes(self, other: Layout) -> str:
        """The factors in which ``other`` differs, with its values, as a recipe writes them."""
        mine, theirs = asdict(self), asdict(other)
        names = {"virtual_stages": "[megatron] virtual_pipeline_model_parallel_size"}
        return ", ".join(
            f"no {names[key]}" if key in names and theirs[key] == 1 else f"{names.get(key, key)} = {theirs[key]}"
            for key, size in mine.items()
            if theirs[key] != size
        )


def check_layout(recipe: Recipe, hf: dict[str, Any], nodes: int | None = 1) -> None:
    """`UserError` for a layout that Megatron would refuse or silently get wrong, with the nearest that works.

    nodes: None where the number of ranks is not known yet and not checked.
    """
    for key, owner in _OWNED.items():
        if key in recipe.megatron:
            raise UserError(f"[megatron] {key} = {recipe.megatron[key]!r}: use {owner}")
    for key, (only, reason) in _REQUIRED.items():
        if recipe.megatron.get(key, only) != only:
            raise UserError(f"[megatron] {key} = {recipe.megatron[key]!r}: {reason}")
    _check_routing(recipe, hf)
    layout = Layout.of(recipe, (nodes or 1) * recipe.actor.processes_per_node)
    if nodes is None:
        factors = {**asdict(layout), "ranks": 1, "virtual_stages": 1}
        layout = replace(layout, ranks=math.prod(factors.values()))
    problem = next(layout.problems(hf), None)
    if problem is None:
        return
    nearest = layout.nearest(hf)
    hint = f"; the nearest layout that works has {layout.changes(nearest)}" if nearest else ""
    raise UserError(f"[actor] {problem}{hint}")


def _check_routing(recipe: Recipe, hf: dict[str, Any]) -> None:
    replay = recipe.actor.routing_replay
    if replay == "none":
        return
    if not hf["num_experts"]:
        raise UserError(f"[actor] routing_replay = {replay!r}: this model has no experts")
    if replay == "engine" and hf["dense_layers"]:
        raise UserError(
            f'[actor] routing_replay = "engine": {hf["dense_layers"]} layers of this model have no experts, and what '
            'engines record of such a model was never checked; use "actor" or "none"'
        )
    if recipe.megatron.get("moe_router_fusion"):
        raise UserError(f"[megatron] moe_router_fusion = true decides before [actor] routing_replay = {replay!r} can")
