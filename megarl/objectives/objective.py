"""What an objective is: settings, a readable definition in torch, and the rule by which the fused pass computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.kernels.token_pass import Rule
from megarl.objectives.parts.fields import check_fields, choice
from megarl.objectives.parts.fused import fused_terms
from megarl.objectives.parts.terms import Terms


@dataclass(frozen=True)
class Objective:
    """Settings of a per-token objective. Calling it maps a `TokenBatch` to `Terms`; it never reduces.

    A subclass defines `terms`, what the paper says, and `rule`, which names the function of the fused token pass that
    computes the same. aggregation: how the caller turns ``terms.loss`` into one number over the whole optimizer batch,
    see `megarl.objectives.parts.aggregation`.
    """

    needs_statistics: ClassVar[bool] = False  # True: has `statistics(batch, group)`, whose result goes into the call
    requires: ClassVar[tuple[str, ...]] = ()  # optional fields of TokenBatch that must be there
    ratio_form: ClassVar[bool] = True  # objective_t = ratio * A; False: weight * A * log pi

    aggregation: str = choice("token_mean", "sequence_mean")

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: TokenBatch, statistics: Any = None, backend: str = "torch") -> Terms:
        """Loss, kept tokens and metrics. Without statistics the batch counts as the whole optimizer batch.

        backend: ``torch`` evaluates the definition; ``cpp``, ``cuda`` and ``triton`` make one fused pass
        (`megarl.kernels.token_pass`), `UserError` if that is not installed.
        """
        if statistics is None and self.needs_statistics:
            statistics = self.statistics(batch.detach(), batch.shard.group if batch.shard else None, backend)
        if backend == "torch":
            return self.terms(batch, statistics)
        return fused_terms(self.rule(batch, statistics), batch, self.aggregation, backend)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        raise NotImplementedError

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        raise UserError(f"{type(self).__name__} has no rule for the fused token pass; use the kernel backend 'torch'")

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch") -> Any:
        """What the call needs to know about the whole optimizer batch: None unless `needs_statistics`.

        batch: all tokens of this rank (`TokenBatch.concatenate` of its micro-batches), detached. group: every rank that
        holds other tokens of the optimizer batch (data x context parallel). No host sync.
        """
        return None
