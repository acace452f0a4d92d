from __future__ import annotations

from dataclasses import dataclass

from megarl.objectives.grpo import Grpo
from megarl.objectives.parts.fields import choice, number


@dataclass(frozen=True)
class Dapo(Grpo):
    """DAPO (arXiv:2503.14476, Eq. 8): `Grpo` with a higher upper bound ("clip-higher"), averaged over tokens.

    DAPO also drops groups whose responses all have the same reward, ``objective.zero_variance = "drop"``, and samples
    others in their place, ``rollout.oversample``.
    """

    eps_high: float = number(0.28, 0)
    aggregation: str = choice("token_mean", "sequence_mean")
