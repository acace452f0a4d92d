"""Which policy generates which batch of a live run: plain arithmetic.

Update b of a run (counted from 0) trains batch b, one update's worth of prompts, and turns policy version b into
version b + 1. A live trainer publishes the versions that are multiples of ``sync_every``. A batch that version v
generated has a lag of b - v updates when it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LagRule:
    """sync_every: u, updates between two published versions.

    max_lag: largest lag of a trained token, in updates.
    delay: None: the newest version that keeps within ``max_lag``. n: exactly version (b // u - n) u, or 0 before that,
    so that the lags of a sync interval are n u to (n + 1) u - 1: MinPRO's buffer, and M2PO's stale-k with n u = k.
    n = 0 is lockstep.

    Raises ValueError with the reason and the nearest value that works.
    """

    sync_every: int
    max_lag: int
    delay: int | None = None

    def __post_init__(self) -> None:
        u, n = self.sync_every, self.delay
        if n is None and self.max_lag < u - 1:
            raise ValueError(
                f"max_lag = {self.max_lag}, but with sync_every = {u} the last batch before a new version is {u - 1} "
                f"updates old: the run would wait for ever. Set max_lag to at least {u - 1}, or sync_every to at most "
                f"{self.max_lag + 1}"
            )
        if n is not None and self.max_lag < (n + 1) * u - 1:
            what = f"delay = {n}" if n else "lockstep"
            largest = (n + 1) * u - 1
            raise ValueError(
                f"max_lag = {self.max_lag}, but {what} with sync_every = {u} makes samples {n * u} to {largest} "
                f"updates old: set max_lag to at least {largest}, or leave it out"
            )

    def version(self, batch: int, newest: int) -> int | None:
        """The version to generate ``batch`` with when ``newest`` is the last published one; None: wait for a newer."""
        if self.delay is None:
            return newest if batch - newest <= self.max_lag else None
        wanted = self.exact(batch)
        return wanted if wanted <= newest else None

    def exact(self, batch: int) -> int:
        """The only version that may generate ``batch``, under a ``delay``."""
        assert self.delay is not None
        return max(0, batch // self.sync_every - self.delay) * self.sync_every

    def is_published(self, version: int) -> bool:
        return version % self.sync_every == 0


def cut_chunks(groups: range, interval: int, size: int) -> list[range]:
    """``groups`` cut every ``interval`` groups, and between these cuts every ``size``: always at the same places.

    Batches on both sides of a new version may need different ones, so no chunk reaches over one.
    """
    starts = range(groups.start, groups.stop, interval)
    intervals = [range(start, min(start + interval, groups.stop)) for start in starts]
    return [part[i : i + size] for part in intervals for i in range(0, len(part), size)]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` that is nearest to ``wanted``, the smaller of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
