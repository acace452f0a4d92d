"""The base class of all objectives: settings, a readable definition in torch, and the rule for the fused token pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.kernels.constants import BAD_PREFIX
from megarl.kernels.token_pass import Rule, has_rule
from megarl.objectives.parts.fields import check_fields, choice, number
from megarl.objectives.parts.fused import fused_terms
from megarl.objectives.parts.terms import Terms, require, rule_terms


@dataclass(frozen=True)
class Objective:
    """Settings of a per-token objective. Calling it maps a `TokenBatch` to `Terms`; it never averages over tokens.

    A subclass defines `rule`, the paper's formula for one token, or `terms`, for what no function of one token can
    compute. aggregation: how the caller turns ``terms.loss`` into one number over the whole optimizer batch,
    see `megarl.objectives.parts.aggregation`. dampen_threshold: effective ratio below which the metrics ``dampen/*``
    count a token as dampened; 0 for the objective's default, see `dampened_below`.
    """

    needs_statistics: ClassVar[bool] = False  # whether the call needs the result of `statistics`
    requires: ClassVar[tuple[str, ...]] = ()  # optional fields of TokenBatch that must not be None
    ratio_form: ClassVar[bool] = True  # objective_t = ratio * A; False: weight * A * log pi

    aggregation: str = choice("token_mean", "sequence_mean")
    dampen_threshold: float = number(0.0, 0)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: TokenBatch, statistics: Any = None, backend: str = "torch") -> Terms:
        """Loss, kept tokens and metrics. Without ``statistics`` they are computed as if ``batch`` were the whole
        optimizer batch.

        backend: ``torch`` evaluates the definition; ``cpp``, ``cuda`` and ``triton`` make one fused pass
        (`megarl.kernels.token_pass`) or, where they have no rule for these settings, evaluate the definition too.
        `UserError` if that backend is not installed, or the batch has wrong shapes or dtypes.
        """
        batch.check()
        batch = batch.floored()
        if statistics is None and self.needs_statistics:
            statistics = self.statistics(batch.detach(), batch.shard.group if batch.shard else None, backend)
        for name in self.requires:
            require(batch, name, type(self).__name__)
        rule = self.rule(statistics) if self.fused and backend != "torch" else None
        if rule is None or not has_rule(rule.function, backend):
            return self.terms(batch, statistics)
        return fused_terms(rule, batch, self.aggregation, self.dampened_below, backend)

    @property
    def dampened_below(self) -> float:
        """`dampen_threshold`, or if that is 0 the objective's default: .8, unless a subclass has another."""
        return self.dampen_threshold or BAD_PREFIX

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        """The objective in torch: its rule, or what a subclass defines instead. statistics: None unless
        `needs_statistics`."""
        return rule_terms(self, self.rule(statistics), batch)

    def rule(self, statistics: Any) -> Rule:
        """The objective of a single token, with its parameters."""
        raise NotImplementedError

    @property
    def fused(self) -> bool:
        """Whether the fused token pass computes all of `terms` from the rule."""
        return type(self).rule is not Objective.rule and not self.couples_tokens

    @property
    def updates_per_proximal_policy(self) -> int:
        """Number of successive updates that share a proximal policy: the batches of all of them get the log-probs of
        the policy before the first one as ``old_logprobs``."""
        return 1

    @property
    def couples_tokens(self) -> bool:
        """Whether the gradient of a token's loss reaches other tokens of its response. Then all losses of a response
        must get the same weight."""
        return False

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch") -> Any:
        """Statistics of the whole optimizer batch, for the call; None unless `needs_statistics`.

        batch: all tokens of this rank (`TokenBatch.concatenate` of its micro-batches), detached. group: the ranks that
        together hold the optimizer batch (data x context parallel). No host sync.
        """
        return None
