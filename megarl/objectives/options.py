"""Terms and weights that combine with any objective: one small dataclass each, switched on by its recipe table.

An option may change the batch that the objective sees (`before`) and the terms that it returns (`after`). The metrics
of the objective describe the changed batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import check_fields, choice, number
from megarl.objectives.parts.metrics import loss_metric, mean_metric
from megarl.objectives.parts.ratios import log_ratio, sequence_log_ratio
from megarl.objectives.parts.terms import Terms, require


@dataclass(frozen=True)
class Option:
    """Base class of options. requires: as `Objective.requires`."""

    requires: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def before(self, batch: TokenBatch) -> TokenBatch:
        """The batch that the objective gets."""
        return batch

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        """The objective's terms, changed. batch: as it was before any option changed it."""
        return terms


@dataclass(frozen=True)
class DualClip(Option):
    """Bound the loss of tokens with A < 0 by clip_ratio_c |A| (arXiv:1912.09729); beyond the bound no gradient.

    Only for objectives of the form ratio * A.
    """

    clip_ratio_c: float = number(3.0, 1)

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        most = torch.where(batch.loss_mask, -self.clip_ratio_c * batch.advantages.detach(), 0)
        capped = batch.loss_mask & (batch.advantages < 0) & (terms.loss.detach() > most)
        terms = replace(terms, loss=torch.where(capped, most, terms.loss), kept=terms.kept & ~capped)
        return terms.flagged("dual_clip_fraction", capped, batch)


@dataclass(frozen=True)
class Mismatch(Option):
    """Base class of the two that weight by pi_old / pi_rollout; the objective's ratios are then to `old_logprobs`."""

    requires: ClassVar[tuple[str, ...]] = ("old_logprobs",)

    def before(self, batch: TokenBatch) -> TokenBatch:
        return replace(batch, rollout_logprobs=require(batch, "old_logprobs", name_of(self)))


@dataclass(frozen=True)
class TruncatedImportance(Mismatch):
    """TIS, truncated importance sampling: the objective's ratios are to `old_logprobs`, and its loss is weighted by
    sg(min(pi_old / pi_rollout, maximum)), the mismatch between trainer and engine.

    pi_old is, in the trainer, the policy with which the stage begins, or in a live run (`updates_per_step`) the updates
    between two versions. Staged and in lockstep it is the behaviour policy; tokens of older policies, which a
    ``delay``, ``max_lag`` or ``token_budget`` allows, are weighted for their age too.
    """

    maximum: float = number(2.0, 0)

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        ratio = _mismatch(batch)
        metrics = terms.metrics | {"mismatch/mean": mean_metric(ratio, batch.loss_mask)}
        terms = replace(terms, loss=ratio.clamp(max=self.maximum) * terms.loss, metrics=metrics)
        return terms.flagged("truncated_weight_fraction", ratio > self.maximum, batch)


@dataclass(frozen=True)
class IcePop(Mismatch):
    """As `TruncatedImportance`, but a token whose mismatch lies outside [minimum, maximum] loses its gradient."""

    minimum: float = number(0.5, 0, 1)
    maximum: float = number(5.0, 1)

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        ratio = _mismatch(batch)
        outside = (ratio < self.minimum) | (ratio > self.maximum)
        metrics = terms.metrics | {"mismatch/mean": mean_metric(ratio, batch.loss_mask)}
        loss = torch.where(outside, 0, ratio * terms.loss)
        terms = replace(terms, loss=loss, kept=terms.kept & ~outside, metrics=metrics)
        return terms.flagged("icepop_fraction", outside, batch)


@dataclass(frozen=True)
class SequenceMask(Option):
    """OPSM (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): a response with A < 0 has no gradient if the mean of
    log pi_rollout - log pi over its tokens exceeds `delta`. The paper gives no value; 1e-4 is slime's default."""

    delta: float = number(1e-4, 0)

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
        drift = -sequence_log_ratio(l, batch, mean=True)
        masked = batch.loss_mask & (batch.advantages < 0) & (drift[batch.sequence_ids] > self.delta)
        terms = replace(terms, loss=torch.where(masked, 0, terms.loss), kept=terms.kept & ~masked)
        return terms.flagged("opsm_fraction", masked, batch)


@dataclass(frozen=True)
class KlPenalty(Option):
    """loss_t + coefficient * KL estimate to `ref_logprobs`; l = log pi - log pi_ref, r = exp(-l). Gradient through pi.

    k1 = l (its gradient is zero in expectation: a metric more than a penalty), k2 = l^2 / 2 (on policy, its gradient is
    that of the KL), k3 = r - 1 + l (GRPO's, DeepSeekMath Eq. 4). http://joschu.net/blog/kl-approx.html
    """

    requires: ClassVar[tuple[str, ...]] = ("ref_logprobs",)

    coefficient: float = number(0.001, 0)
    kind: str = choice("k3", "k1", "k2")

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        l, _ = log_ratio(batch.logprobs, require(batch, "ref_logprobs", "kl"), batch.loss_mask)
        k3 = (-l).exp() - 1 + l
        penalty = {"k1": l, "k2": l.square() / 2, "k3": k3}[self.kind]
        metrics = {"kl_ref/k1": mean_metric(l, batch.loss_mask), "kl_ref/k3": mean_metric(k3, batch.loss_mask)}
        return replace(terms, loss=terms.loss + self.coefficient * penalty, metrics=terms.metrics | metrics)


@dataclass(frozen=True)
class EntropyBonus(Option):
    """loss_t - coefficient * H_t; `entropy` holds the policy's entropy at each token, in nats, with gradient."""

    requires: ClassVar[tuple[str, ...]] = ("entropy",)

    coefficient: float = number(0.001, 0)

    def after(self, batch: TokenBatch, terms: Terms) -> Terms:
        entropy = torch.where(batch.loss_mask, require(batch, "entropy", "entropy_bonus"), 0)
        return replace(terms, loss=terms.loss - self.coefficient * entropy)


# in the order in which they are applied
OPTIONS: dict[str, type[Option]] = {
    "dual_clip": DualClip,
    "truncated_importance": TruncatedImportance,
    "icepop": IcePop,
    "opsm": SequenceMask,
    "kl": KlPenalty,
    "entropy_bonus": EntropyBonus,
}


def name_of(option: Option) -> str:
    """The name of an option's recipe table, [objective.NAME]."""
    return next(name for name, kind in OPTIONS.items() if type(option) is kind)


@dataclass(frozen=True)
class WithOptions(Objective):
    """An objective and its options."""

    objective: Objective = field(kw_only=True)
    options: tuple[Option, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        for name in ("aggregation", "needs_statistics"):
            object.__setattr__(self, name, getattr(self.objective, name))
        requires = (name for option in self.options for name in option.requires)
        object.__setattr__(self, "requires", (*self.objective.requires, *requires))
        if any(isinstance(o, DualClip) for o in self.options) and not self.objective.ratio_form:
            raise UserError(f"dual_clip bounds ratio * A, but {type(self.objective).__name__} weights log pi instead")
        for option in self.options:
            if self.objective.couples_tokens and isinstance(option, DualClip | Mismatch):
                raise UserError(
                    f"{name_of(option)} weights each token by itself, but with these settings of "
                    f"{type(self.objective).__name__} the gradient of a token's loss also reaches earlier tokens; "
                    "leave the option out or change these settings"
                )
        mismatches = sum(isinstance(option, Mismatch) for option in self.options)
        if mismatches and "old_logprobs" in self.objective.requires:
            raise UserError(
                f"{type(self.objective).__name__} weights by pi_old / pi_rollout itself; leave out the options that do"
            )
        if mismatches > 1:
            raise UserError("truncated_importance and icepop both weight by pi_old / pi_rollout; choose one")

    @property
    def updates_per_proximal_policy(self) -> int:
        return self.objective.updates_per_proximal_policy

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch") -> Any:
        return self.objective.statistics(self._seen(batch), group, backend)

    def __call__(self, batch: TokenBatch, statistics: Any = None, backend: str = "torch") -> Terms:
        terms = self.objective(self._seen(batch), statistics, backend)
        for option in self.options:
            terms = option.after(batch, terms)
        metrics = terms.flagged("kept_fraction", terms.kept, batch).metrics  # without what options mute
        return replace(terms, metrics=metrics | {"loss": loss_metric(terms.loss, batch, self.aggregation)})

    def _seen(self, batch: TokenBatch) -> TokenBatch:
        for option in self.options:
            batch = option.before(batch)
        return batch


def _required(objective: Objective) -> set[str]:
    """What the options of an objective require of a batch."""
    options = objective.options if isinstance(objective, WithOptions) else ()
    return {name for option in options for name in option.requires}


def frozen_logprobs(objective: Objective, sync_every: int | None) -> set[str]:
    """The log-probs that options need of other models: of the run's first policy, and of the stage's in staged runs.

    sync_every: that of a live run; None: the run is staged.
    """
    return _required(objective) & ({"ref_logprobs"} if sync_every else {"ref_logprobs", "old_logprobs"})


def updates_per_step(objective: Objective, sync_every: int | None) -> int:
    """The updates of a step: they all get the log-probs of the policy before the first one as ``old_logprobs``.

    sync_every: as in `frozen_logprobs`.
    """
    if sync_every is not None and "old_logprobs" in _required(objective):
        return sync_every
    return objective.updates_per_proximal_policy


def _mismatch(batch: TokenBatch) -> torch.Tensor:
    """[T] pi_old / pi_rollout without gradient, 1 where not trained."""
    old = require(batch, "old_logprobs", "the importance weight").detach()
    return log_ratio(old, batch.rollout_logprobs, batch.loss_mask)[0].exp()
