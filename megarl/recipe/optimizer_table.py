"""``[optimizer]``: Adam and its learning rate."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megarl.recipe.base import Table


class OptimizerTable(Table):
    lr: float = Field(1e-6, gt=0, le=1)
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_updates: int = Field(0, ge=0)  # linear warm-up over the run's first updates
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
        if self.min_lr and self.schedule == "constant":
            raise ValueError('min_lr is the end of a decay, but schedule = "constant" has none: leave min_lr out')
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}")
        return self

    def learning_rate(self, update: int, total: int) -> float:
        """The learning rate of update number ``update``, from 1 to ``total``, the updates of the whole run.

        It rises linearly to `lr` at update ``warmup_updates``. Then it stays there (constant); or it falls to `min_lr`
        at the last update, linearly (linear), as half a cosine (cosine), or linearly over only the last
        ``decay_updates`` (wsd: warm-up, stable, decay).
        """
        if update < self.warmup_updates:
            return self.lr * update / self.warmup_updates
        if self.schedule == "constant":
            return self.lr
        begin = max(1, self.warmup_updates)
        if self.decay_updates is not None:
            begin = max(begin, total - self.decay_updates)
        progress = min(1.0, max(0.0, (update - begin) / max(1, total - begin)))
        factor = 0.5 + 0.5 * math.cos(math.pi * progress) if self.schedule == "cosine" else 1 - progress
        return self.min_lr + (self.lr - self.min_lr) * factor
