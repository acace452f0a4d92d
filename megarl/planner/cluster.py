"""Lengths of responses, which are random, and the time to decode a batch of them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Distribution of the tokens of responses: log-normal, cut at ``longest``."""

    longest: float
    log_median: float
    spread: float  # standard deviation of the logarithm; 0: all are equal

    @classmethod
    def of_mean(cls, mean: float, longest: float, spread: float) -> Lengths:
        """The distribution whose mean, after the cut, is ``mean``; found by bisection."""
        if spread == 0 or mean >= longest:
            return cls(longest, math.log(mean), 0.0)
        # without a cut the mean would be exp(log_median + spread^2 / 2)
        low, high = math.log(mean) - spread**2 / 2, math.log(longest) + 40 * spread
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if cut_mean(middle, spread, longest) < mean else (low, middle)
        return cls(longest, (low + high) / 2, spread)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.minimum(np.exp(self.log_median + self.spread * rng.standard_normal(shape)), self.longest)


def cut_mean(log_median: float, spread: float, longest: float) -> float:
    """Mean of min(X, longest) of a log-normal X."""
    edge = (math.log(longest) - log_median) / spread
    below = math.exp(log_median + spread**2 / 2) * _NORMAL.cdf(edge - spread)
    return below + longest * (1 - _NORMAL.cdf(edge))


def decode_seconds(lengths: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Seconds until each replica has generated its responses.

    Args:
        lengths: [replicas, responses] tokens.
        step: [slots + 1] seconds of a decoding step, by the number of responses in it. A response waits while all slots
            are taken. As responses end, steps have fewer of them.

    Returns: [replicas].
    """
    slots = len(step) - 1
    if lengths.shape[1] > slots:
        return np.array([_refilled(row, step) for row in lengths])
    ends = np.sort(lengths, axis=1)
    tokens = np.diff(ends, axis=1, prepend=0.0)
    running = np.arange(lengths.shape[1], 0, -1)
    return np.asarray((tokens * step[running]).sum(axis=1))


def _refilled(lengths: np.ndarray, step: np.ndarray) -> float:
    """Seconds of one replica with fewer slots than responses; a slot takes the next response as soon as it is free."""
    slots = len(step) - 1
    ends: list[float] = lengths[:slots].tolist()
    heapq.heapify(ends)
    for length in lengths[slots:].tolist():
        heapq.heapreplace(ends, ends[0] + length)
    # all slots are taken until the first of the last responses ends
    last = np.sort(np.array(ends))
    tokens = np.diff(last, prepend=0.0)
    return float((tokens * step[np.arange(slots, 0, -1)]).sum())


def ends_of_batches(lengths: np.ndarray, step: np.ndarray, replicas: int) -> np.ndarray:
    """[batches] seconds until the longest response of each batch has ended; all batches begin together.

    lengths: [batches, responses] tokens, not more than there are slots. step: as in `decode_seconds`.
    """
    tokens = np.sort(lengths, axis=None)
    running = np.ceil(np.arange(len(tokens), 0, -1) / replicas).astype(int)
    seconds = np.cumsum(np.diff(tokens, prepend=0.0) * step[running])
    return np.asarray(np.interp(lengths.max(axis=1), tokens, seconds))
