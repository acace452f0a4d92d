"""``[actor]`` and ``[optimizer]`` of a recipe: the trainer's layout, what it recomputes, adapters, Adam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from megarl.errors import did_you_mean
from megarl.recipe.base import Table

# parts of layers for ``[actor] recompute``: ``recompute_modules`` of Megatron-Core 0.16.1 that megarl's layers have
MODULES = ("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts")
# keys of ``[megatron]`` that ``[actor] recompute`` replaces
OWNED = ("recompute_granularity", "recompute_modules", "moe_layer_recompute")


def _known(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if value in ("none", "full"):
        return value
    if isinstance(value, str):
        raise ValueError(f"{value!r} is neither 'none' nor 'full' nor a list of {', '.join(MODULES)}")
    for name in value:
        if name not in MODULES:
            raise ValueError(f"{name!r} is not a part of a layer; {did_you_mean(name, MODULES)}")
    if not value or len(set(value)) < len(value):
        raise ValueError("the list must name at least one part of a layer, and none twice; or use 'none'")
    return value


RecomputeSetting = Annotated[str | Annotated[tuple[str, ...], Field(strict=False)], AfterValidator(_known)]


@dataclass(frozen=True)
class Recompute:
    """``[actor] recompute``: activations that the backward pass recomputes from their input, instead of storing them.

    Parts of every layer (``modules``), whole layers (``whole``), or nothing.
    """

    modules: frozenset[str] = frozenset()
    whole: bool = False
    method: str = "uniform"  # "block": the first ``layers`` of a model chunk; "uniform": all, ``layers`` at a time
    layers: int = 1

    @classmethod
    def of(cls, setting: str | Sequence[str], megatron: dict[str, Any]) -> Recompute:
        """From ``[actor] recompute`` and, for "full", ``recompute_method`` and ``_num_layers`` of ``[megatron]``."""
        if setting == "none":
            return cls()
        if setting == "full":
            method, layers = megatron.get("recompute_method", "uniform"), megatron.get("recompute_num_layers", 1)
            return cls(whole=True, method=method, layers=layers)
        return cls(modules=frozenset(setting))

    def megatron_settings(self) -> dict[str, Any]:
        """The corresponding fields of Megatron's TransformerConfig."""
        if self.whole:
            return dict(recompute_granularity="full", recompute_method=self.method, recompute_num_layers=self.layers)
        if self.modules:
            return dict(recompute_granularity="selective", recompute_modules=sorted(self.modules))
        return {}

    def again(self, layers: int) -> int:
        """How many layers of a model chunk of ``layers`` layers are recomputed as a whole."""
        if not self.whole:
            return 0
        return min(layers, self.layers) if self.method == "block" else layers


class LoraTable(Table):
    """``[actor.lora]``: train low-rank adapters beside the actor's matrices, which stay frozen."""

    rank: int = Field(32, ge=1, le=10**5)  # of every adapter; q, k and v share one adapter, and so do gate and up
    alpha: float = Field(32.0, gt=0, le=10**6)  # an adapter's output is scaled by alpha / rank
    # Megatron's names of a layer's matrices, or the ends of names: "experts.linear_fc1" is that of routed experts only
    targets: tuple[str, ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), strict=False, min_length=1
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ActorTable(Table):
    backend: Literal["cpu", "cuda"] = "cuda"  # where the actor trains
    processes_per_node: int = Field(1, ge=1, le=1024)  # trainer ranks, one a GPU
    tensor_parallel: int = Field(1, ge=1)  # ranks that share each matrix
    pipeline_parallel: int = Field(1, ge=1)  # ranks that share the layers
    context_parallel: int = Field(1, ge=1)  # ranks that share the tokens of a sequence
    expert_parallel: int = Field(1, ge=1)  # ranks that share the experts
    expert_tensor_parallel: int | None = Field(None, ge=1)  # default: tensor_parallel
    # a response with more tokens gets a micro-batch of its own
    tokens_per_micro_batch: int = Field(16384, ge=1, le=10**9)
    statistics_scope: Literal["exact", "micro"] = "exact"  # tokens of a batch statistic: docs/objectives.md
    kernels: Literal["torch", "cpp", "cuda", "triton"] | None = None  # default: cpp on a CPU, triton on a GPU
    recompute: RecomputeSetting = "none"  # of activations: "none", "full", or a list of parts of a layer: docs/scale.md
    layers: Literal["torch", "transformer_engine"] = "torch"  # the library of the model's layers
    # whose choice of experts trains: none: the policy's own; actor: the stage's first policy's; engine: the engine's
    routing_replay: Literal["none", "actor", "engine"] = "none"
    checkpoint_every: int = Field(64, ge=1)  # updates between checkpoints
    max_skipped_updates: int = Field(0, ge=0)  # non-finite updates that the whole run may skip; one more stops it
    keep_checkpoints: int = Field(2, ge=1)  # newest checkpoints of a stage that are kept
    keep_stages: int | None = Field(None, ge=1)  # newest finished stages whose checkpoints are kept; default: all
    keep_policies: int | None = Field(None, ge=1)  # those whose policy is kept, besides the run's first; default: all
    lora: LoraTable | None = None  # train low-rank adapters instead of the model's weights (docs/scale.md)

    @property
    def trains_recorded_experts(self) -> bool:
        """Whether tokens train with the experts to which the engine routed them, so that rollouts record these."""
        return self.routing_replay == "engine"

    @property
    def kernel_backend(self) -> str:
        return self.kernels or {"cpu": "cpp", "cuda": "triton"}[self.backend]

    @property
    def head_backend(self) -> str:
        """The kernel backend of the fused lm head, which has no C++ or CUDA version."""
        return "triton" if self.kernel_backend in ("triton", "cuda") else "torch"


class OptimizerTable(Table):
    """``[optimizer]``: Adam and its learning rate."""

    lr: float = Field(1e-6, gt=0, le=1)  # learning rate after the warm-up
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)  # Adam's decay of its two moments
    eps: float = Field(1e-8, gt=0)  # Adam's, beside the square root of the second moment
    weight_decay: float = Field(0.01, ge=0)  # AdamW's: of matrices alone
    warmup_updates: int = Field(0, ge=0)  # linear warm-up over the run's first updates
    # updates after which the warm-up rises, from 0 (verl's steps, whose first one has a learning rate of 0); default:
    # it rises every update, from lr / warmup_updates
    warmup_step: int | None = Field(None, ge=1)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"  # after the warm-up; wsd: stable, then decay
    min_lr: float = Field(0.0, ge=0)  # learning rate at the last update of the run, unless it is constant
    decay_updates: int | None = Field(None, ge=1)  # wsd: length of the linear decay at the end of the run
    # multiply the learning rate by sqrt(ESS / responses), the effective sample size of the weights prod_t rho_t of the
    # update's responses (VCPO, arXiv:2602.17616)
    ess_scaling: bool = False
    clip_grad: float = Field(1.0, ge=0)  # global L2 norm; 0 turns clipping off

    @field_validator("betas")
    @classmethod
    def _unit_interval(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each beta must lie in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _schedule_agrees(self) -> OptimizerTable:
        if (self.decay_updates is None) == (self.schedule == "wsd"):
            raise ValueError('schedule = "wsd" needs decay_updates, the length of its decay; no other schedule has it')
        if self.warmup_step and not self.warmup_updates:
            raise ValueError("warmup_step is a setting of a warm-up: set warmup_updates too")
        if self.min_lr and self.schedule == "constant":
            raise ValueError('min_lr is the end of a decay, but schedule = "constant" has none: leave min_lr out')
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}")
        return self

    def learning_rate(self, update: int, total: int) -> float:
        """The learning rate of update number ``update``, from 1 to ``total``, the updates of the whole run.

        It rises linearly to `lr` at update ``warmup_updates``, or with ``warmup_step`` in the step after it. Then it
        stays there (constant); or it falls to `min_lr` at the last update, linearly (linear), as half a cosine
        (cosine), or linearly over only the last ``decay_updates`` (wsd: warm-up, stable, decay).
        """
        risen = update if self.warmup_step is None else update - 1 - (update - 1) % self.warmup_step
        if risen < self.warmup_updates:
            return self.lr * risen / self.warmup_updates
        if self.schedule == "constant":
            return self.lr
        begin = max(1, self.warmup_updates)
        if self.decay_updates is not None:
            begin = max(begin, total - self.decay_updates)
        progress = min(1.0, max(0.0, (update - begin) / max(1, total - begin)))
        factor = 0.5 + 0.5 * math.cos(math.pi * progress) if self.schedule == "cosine" else 1 - progress
        return self.min_lr + (self.lr - self.min_lr) * factor
