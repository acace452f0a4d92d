"""`Terms`, the result of an objective, and the metrics that all objectives have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.kernels.constants import BAD_PREFIX
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, RuleFunction, Sequence, Token
from megarl.objectives.parts.histograms import histogram
from megarl.objectives.parts.metrics import Metric, loss_metric, mean_metric, token_metrics
from megarl.objectives.parts.prefix_min import prefix_min_log_ratio
from megarl.objectives.parts.ratios import log_ratio


@dataclass(frozen=True)
class Terms:
    """loss [T] float32, not reduced, exactly 0 where ``loss_mask`` is False; kept [T] bool, tokens whose policy
    gradient survives mask, veto and clip; metrics {name: (sum, count)} and histograms {name: counts [BINS] int64} of
    the log-ratio (``ratio``) and of log m_t (``prefix_min``), which add over ranks and micro-batches; flags {name: [T]
    bool}, see `flagged`, empty after the fused token pass."""

    loss: torch.Tensor
    kept: torch.Tensor
    metrics: dict[str, Metric]
    histograms: dict[str, torch.Tensor]
    flags: dict[str, torch.Tensor] = field(default_factory=dict)

    def flagged(self, name: str, where: torch.Tensor, batch: TokenBatch) -> Terms:
        """The same with the share of trained tokens for which ``where`` [T] is True: among all, those with A > 0, and
        those with A < 0.

        A name that ends with ``_fraction`` says why tokens are muted, such as ``veto_fraction``: the report, sweeps,
        what-if and ``megarl samples`` show every such metric.
        """
        mask, values = batch.loss_mask, where.double()
        metrics = self.metrics | {
            name: mean_metric(values, mask),
            f"{name}/positive": mean_metric(values, mask & (batch.advantages > 0)),
            f"{name}/negative": mean_metric(values, mask & (batch.advantages < 0)),
        }
        return replace(self, metrics=metrics, flags=self.flags | {name: where})


def require(batch: TokenBatch, name: str, who: str) -> torch.Tensor:
    """The batch's optional field ``name``; `UserError` if it is None. who: what needs it, for the message."""
    tensor = getattr(batch, name)
    if tensor is None:
        raise UserError(f"{who} needs TokenBatch.{name}, but it is None")
    return tensor


class Settings(Protocol):
    """The settings of an objective that `make_terms` reads."""

    @property
    def aggregation(self) -> str: ...

    @property
    def dampened_below(self) -> float: ...


def make_terms(
    settings: Settings,
    batch: TokenBatch,
    loss: torch.Tensor,  # [T], any value where loss_mask is False
    kept: torch.Tensor,  # [T] bool
    log_ratio: torch.Tensor,  # [T], clamped, 0 where loss_mask is False
    clamped: torch.Tensor,  # [T] bool, where the log-ratio was clamped
    metrics: dict[str, Metric],  # the objective's own
    log_m: torch.Tensor | None = None,  # [T], see `prefix_min_log_ratio`; None: computed
) -> Terms:
    """Mask the loss and add the metrics that every objective has, see `token_metrics`.

    ValueError unless ``loss`` and ``kept`` have a number for each token: a mean or sum would be broadcast.
    """
    mask = batch.loss_mask
    if not loss.shape == kept.shape == mask.shape:
        given = f"loss {list(loss.shape)} and kept {list(kept.shape)}"
        raise ValueError(f"make_terms got {given}, expected {list(mask.shape)}, a number for each token")
    loss, kept = torch.where(mask, loss, 0), kept & mask
    prefix = prefix_min_log_ratio(log_ratio, batch) if log_m is None else log_m
    sums = _sums(batch, loss, kept, log_ratio, clamped, prefix, settings.dampened_below)
    common = token_metrics(sums, {"kept": "kept_fraction"})
    common["loss"] = loss_metric(loss, batch, settings.aggregation)
    if batch.entropy is not None:
        common["entropy"] = mean_metric(batch.entropy, mask)
    histograms = {"ratio": histogram(log_ratio, mask), "prefix_min": histogram(prefix, mask)}
    return Terms(loss, kept, common | metrics, histograms)


def _sums(
    batch: TokenBatch,
    loss: torch.Tensor,
    kept: torch.Tensor,
    log_ratio: torch.Tensor,
    clamped: torch.Tensor,
    prefix: torch.Tensor,  # log m_t [T]
    dampened_below: float,
) -> dict[str, torch.Tensor]:
    """What `token_metrics` takes: sums over the trained tokens, with few kernel launches for all of them together."""
    l, above, below = log_ratio.detach().double(), batch.advantages > 0, batch.advantages < 0
    ratio, square = l.exp(), l.square()
    trust, bad = (above & (l > 0)) | (below & (l < 0)), prefix < math.log(BAD_PREFIX)
    dampened = {"token": log_ratio.exp() < dampened_below, "prefix": (prefix + log_ratio).exp() < dampened_below}
    values = {
        "tokens": torch.ones_like(kept),
        "positive": above,
        "negative": below,
        "ratio": ratio,
        "ratio_square": ratio.square(),
        "chi2": (ratio - 1).square(),
        "log_ratio": l,
        "k3": ratio - 1 - l,
        "square": square,
        "trust": trust,
        "trust_square": torch.where(trust, square, 0),
        "trust_kept": trust & kept,
        "trust_kept_square": torch.where(trust & kept, square, 0),
        "clamped": clamped,
        "kept": kept,
        "kept_positive": kept & above,
        "kept_negative": kept & below,
        "bad_prefix": bad,
        **{f"dampened_{kind}": flag for kind, flag in dampened.items()},
        **{f"dampened_{kind}_bad": flag & bad for kind, flag in dampened.items()},
        "ratio_positive": torch.where(above, ratio, 0),
        "ratio_negative": torch.where(below, ratio, 0),
        "loss": loss,
        "loss_positive": torch.where(above, loss, 0),
    }
    stacked = torch.stack([value.detach().double() for value in values.values()])
    return dict(zip(values, torch.where(batch.loss_mask, stacked, 0).sum(1), strict=True))


def tokens_of(batch: TokenBatch) -> tuple[Token, torch.Tensor]:
    """The batch's tokens for a rule that torch evaluates, without gradient, 0 where not trained; and log m_t [T]."""
    values = (batch.logprobs, batch.rollout_logprobs, batch.old_logprobs, batch.advantages)
    logprob, rollout, old, advantage = (
        batch.logprobs if x is None else torch.where(batch.loss_mask, x.detach(), 0) for x in values
    )
    l, clamped = log_ratio(logprob, rollout, batch.loss_mask)
    log_m = prefix_min_log_ratio(l, batch)
    ratios = (l, l.exp(), (log_m + l).exp())
    never = torch.zeros_like(clamped)
    return Token(logprob, rollout, old, advantage, *ratios, clamped, batch.positions, never), log_m


def sequences_of(rule: Rule, l: torch.Tensor, batch: TokenBatch) -> Sequence:
    """What the rule needs of the whole sequences, [S] or ``per_token`` [T] each; l [T]: the clamped log-ratios."""
    function = rule.function
    if function.quantity is None:
        return Sequence(None, None)
    s = function.quantity(l, batch, rule.parameters)
    length = batch.logprobs.numel() if function.per_token else batch.cu_seqlens.numel() - 1
    if any(x is not None and x.shape != (length,) for x in s):
        given = " and ".join(str(list(x.shape)) for x in s if x is not None)
        each = "token" if function.per_token else "response"
        raise ValueError(f"{function.name} needs a number for each {each}, [{length}], but its quantity gives {given}")
    return Sequence(None if s.value is None else s.value.to(l.dtype), s.index)


def rule_terms(settings: Settings, rule: Rule, batch: TokenBatch) -> Terms:
    """`Terms` of the objective with this rule, evaluated in torch."""
    if not isinstance(rule, Rule) or not isinstance(rule.function, RuleFunction):
        raise TypeError("the method rule must return Rule(FUNCTION, (PARAMETERS...)) with a function that has @rule()")
    t, log_m = tokens_of(batch)
    s = sequences_of(rule, t.log_ratio, batch)
    if not rule.function.per_token:
        s = Sequence(*(x if x is None else x[batch.sequence_ids] for x in s))
    o = rule.function.function(t, s, *rule.parameters)
    if not isinstance(o, Outcome):
        raise TypeError(f"{rule.function.name} returned {o!r:.50}, expected an Outcome; is a return missing?")
    terms = outcome_terms(settings, batch, t, log_m, o, rule.first, rule.second)
    scalars = {n: mean_metric(x.double().expand_as(t.ratio), batch.loss_mask) for n, x in rule.scalars.items()}
    return replace(terms, metrics=terms.metrics | scalars)


class _Loss(torch.autograd.Function):
    """-value [T], whose derivative with respect to the log-probs is -coefficient [T], and 0 where ``mask`` is False."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: torch.Tensor, value: torch.Tensor, coefficient: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(coefficient, mask)
        return -value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        coefficient, mask = ctx.saved_tensors
        return torch.where(mask, -gradient * coefficient, 0), None, None, None


def outcome_terms(
    settings: Settings,
    batch: TokenBatch,
    t: Token,
    log_m: torch.Tensor,
    o: Outcome,
    first: str | None = None,  # the metrics of the outcome's flags
    second: str | None = None,
) -> Terms:
    """`Terms` of an outcome. The gradient of the loss with respect to the log-probs is its coefficient."""
    loss = _Loss.apply(batch.logprobs, o.value, o.coefficient, batch.loss_mask)
    terms = make_terms(settings, batch, loss, o.kept, t.log_ratio, t.clamped, {}, log_m)
    for name, flag in ((first, o.first), (second, o.second)):
        if name is not None:
            terms = terms.flagged(name, flag, batch)
    return terms
