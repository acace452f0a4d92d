"""The base of all objectives: settings, a readable definition in torch, and the rule of the fused token pass for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.kernels.constants import BAD_PREFIX
from megarl.kernels.token_pass import Rule, has_rule
from megarl.objectives.parts.fields import check_fields, choice, number
from megarl.objectives.parts.fused import fused_terms
from megarl.objectives.parts.terms import Terms


@dataclass(frozen=True)
class Objective:
    """Settings of a per-token objective. Calling it maps a `TokenBatch` to `Terms`; it never reduces.

    A subclass defines `terms`, what the paper says, and `rule`, which names the function of the fused token pass that
    computes the same. aggregation: how the caller turns ``terms.loss`` into one number over the whole optimizer batch,
    see `megarl.objectives.parts.aggregation`. dampen_threshold: effective ratio below which the metrics ``dampen/*``
    count a token as dampened; 0 for the objective's own, see `dampened_below`.
    """

    needs_statistics: ClassVar[bool] = False  # True: has `statistics(batch, group)`, whose result goes into the call
    requires: ClassVar[tuple[str, ...]] = ()  # optional fields of TokenBatch that must be there
    ratio_form: ClassVar[bool] = True  # objective_t = ratio * A; False: weight * A * log pi

    aggregation: str = choice("token_mean", "sequence_mean")
    dampen_threshold: float = number(0.0, 0)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: TokenBatch, statistics: Any = None, backend: str = "torch") -> Terms:
        """Loss, kept tokens and metrics. Without statistics the batch counts as the whole optimizer batch.

        backend: ``torch`` evaluates the definition; ``cpp``, ``cuda`` and ``triton`` make one fused pass
        (`megarl.kernels.token_pass`). `UserError` if that is not installed, and for a batch of wrong shapes or dtypes.
        """
        batch.check()
        if statistics is None and self.needs_statistics:
            statistics = self.statistics(batch.detach(), batch.shard.group if batch.shard else None, backend)
        if backend == "torch":
            return self.terms(batch, statistics)
        return fused_terms(self.rule(batch, statistics), batch, self.aggregation, self.dampened_below, backend)

    @property
    def dampened_below(self) -> float:
        """`dampen_threshold`, or where that is 0 the lower bound of the objective's ratios; .8 if it has none."""
        return self.dampen_threshold or BAD_PREFIX

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        raise NotImplementedError

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        raise UserError(f"{type(self).__name__} has no rule for the fused token pass")

    def check(self, backend: str, mixes_policies: bool) -> None:
        """`UserError` for what can be known before any process starts: ``backend`` cannot evaluate this objective.

        backend: of the kernels, as in a call. mixes_policies: of a run in which several policies generate what a stage
        trains; any objective can train in it, but not every option.
        """
        if backend != "torch" and not (self.fusible and has_rule(self._rule_name(), backend)):
            raise UserError(
                f"{type(self).__name__} has no rule for the fused token pass of kernels = {backend!r}: use "
                '[actor] kernels = "torch", which evaluates its definition'
            )

    @property
    def updates_a_step(self) -> int:
        """Updates of which each batch gets the log-probs of the policy before the first as ``old_logprobs``."""
        return 1

    @property
    def couples_tokens(self) -> bool:
        """Whether the gradient of a token's loss reaches other tokens of its response; then the losses of a response
        may only be weighted alike."""
        return False

    @property
    def fusible(self) -> bool:
        """Whether `rule` names what the fused token pass does for these settings."""
        return type(self).rule is not Objective.rule

    def _rule_name(self) -> str:
        nothing = torch.zeros(0)
        batch = TokenBatch(nothing, nothing, nothing, nothing.bool(), torch.zeros(1, dtype=torch.int32), nothing)
        return self.rule(batch, self.statistics(batch)).name

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch") -> Any:
        """What the call needs to know about the whole optimizer batch: None unless `needs_statistics`.

        batch: all tokens of this rank (`TokenBatch.concatenate` of its micro-batches), detached. group: every rank that
        holds other tokens of the optimizer batch (data x context parallel). No host sync.
        """
        return None
