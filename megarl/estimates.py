"""What is estimated from right and wrong responses to a sample of prompts: avg@k, pass@k, maj@k and differences.

The prompt is the unit of every interval, because the responses to one prompt are correlated: more samples make the
score of each prompt sharper, only more prompts answer for other prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Interval = list[float]  # of 95 %: low, high
RESAMPLES = 10_000  # of the bootstrap


def summarise(correct: np.ndarray, answers: Sequence[Sequence[str | None]] | None = None) -> dict[str, object]:
    """What an evaluation found: ``correct`` [prompts, n], each 1 or 0, and the ``answers`` beside them, if any.

    ``accuracy`` is avg@n, ``pass_at`` pass@k for k = 1 to n, ``maj_at_k`` maj@n; each with its 95 % interval. For
    n = 1 all are the accuracy, which then stands alone.
    """
    prompts, n = correct.shape
    summary: dict[str, object] = {
        "accuracy": float(correct.mean()),
        "ci95": interval(correct.mean(1), n),
        "prompts": prompts,
        "samples": n,
    }
    if n == 1:
        return summary
    passed = pass_at(correct)  # [prompts, n]
    bounds = [interval(passed[:, k - 1], n // k) for k in range(1, n + 1)]
    curve = passed.mean(0).tolist()
    summary |= {"pass_at_k": curve[-1], "pass_at_k_ci95": bounds[-1], "pass_at": curve, "pass_at_ci95": bounds}
    if answers is not None:
        right = np.array([majority(*row) for row in zip(correct, answers, strict=True)])
        summary |= {"maj_at_k": float(right.mean()), "maj_at_k_ci95": interval(right)}
    return summary


def pass_at(correct: np.ndarray) -> np.ndarray:
    """[prompts, n] of 1 and 0 -> [prompts, n]: of each prompt the probability that k of its n responses, k = 1 to n,
    drawn without replacement, have a right one.

    1 - C(n - c, k) / C(n, k) with c right ones, the unbiased estimator of pass@k: Chen et al. 2021 (arXiv 2107.03374),
    Equation 1.
    """
    n = correct.shape[1]
    wrong, drawn = (n - correct.sum(1))[:, None], np.arange(n)[None]
    # none of the first k right, and then the next is wrong too; once the wrong ones are used up it is 0, and stays 0
    return 1 - np.cumprod(np.maximum(wrong - drawn, 0) / (n - drawn), axis=1)


def majority(correct: np.ndarray, answers: Sequence[str | None]) -> float:
    """Whether the most frequent answer of one prompt is right: maj@n (Wang et al. 2022, arXiv 2203.11171).

    Right responses ([n] of 1 and 0) agree with each other, whatever their texts; wrong ones agree that give the same
    answer. A wrong response without an answer has no vote. Among equally frequent answers one is drawn: then it is the
    probability that the right one is.
    """
    right = int(correct.sum())
    votes = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if answer and not is_right)
    most = max(votes.values(), default=0)
    if right != most or right == 0:
        return float(right > most)
    return 1 / (1 + sum(count == most for count in votes.values()))


def interval(scores: np.ndarray, samples: int = 1) -> Interval:
    """95 % interval of the mean of one score in [0, 1] a prompt, each itself the mean of so many ``samples``.

    Samples of one prompt are correlated, so the prompt is the unit. For one sample it is Wilson's, exact for scores of
    0 and 1 and too wide for others. Else it is Wilson's with the scores' own variance, Student's t for the normal
    distribution, and one more prompt that is right half of the time: a few prompts that happen to agree say little
    about how prompts differ. It keeps a width at accuracy 0 and 1, stays inside [0, 1], and covers the truth in 94 % of
    the cases or more from 2 prompts on.
    """
    n, mean, z = len(scores), float(scores.mean()), NormalDist().inv_cdf(0.975)
    n_effective = float(n)  # tosses of a coin with the same mean that tell as much
    if samples > 1:
        z, mean = _student_t(n - 1), float((scores.sum() + 0.5) / (n + 1))
        variance = float(((scores - mean) ** 2).sum() + (0.5 - mean) ** 2) / n
        n_effective = min(n * mean * (1 - mean) / variance, n * samples) if variance > 0 else n * samples
    centre = (mean + z * z / (2 * n_effective)) / (1 + z * z / n_effective)
    half = z / (1 + z * z / n_effective) * math.sqrt(mean * (1 - mean) / n_effective + z * z / (4 * n_effective**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mean_of_replicates(values: np.ndarray) -> tuple[float, Interval]:
    """Mean of one number a replicate (a seed, a batch), two or more, and Student's 95 % interval: where the mean of
    ever more such replicates lies."""
    n, mean = len(values), float(values.mean())
    half = _student_t(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return mean, [mean - half, mean + half]


def _student_t(freedom: int) -> float:
    """The .975 quantile, to 1 %: exact for 1 and 2 degrees of freedom, else its expansion (Abramowitz, Stegun 26.7.5).

    With none there is no variance to estimate, and nothing is known.
    """
    if freedom <= 2:
        return (1e6, math.tan(0.475 * math.pi), 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025)))[freedom]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


@dataclass(frozen=True)
class Difference:
    """Scores of B less those of A on the same prompts."""

    mean: float
    ci95: Interval
    better: int  # prompts on which B has the higher score
    worse: int
    p_value: float  # of the sign test


def paired(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Difference:
    """``b`` - ``a``, two scores a prompt, [prompts] each: what differs between prompts cancels.

    The interval is the bootstrap's over prompts, by percentiles (Efron and Tibshirani 1993, chapter 13).
    """
    difference = b - a
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    means = _resampled_means(difference, np.random.default_rng(seed))
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(difference.mean()), [float(low), float(high)], better, worse, sign_test(better, worse))


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[RESAMPLES] means of as many values drawn with replacement, a few resamples at a time."""
    size = max(1, (1 << 22) // len(values))
    counts = [min(size, RESAMPLES - begun) for begun in range(0, RESAMPLES, size)]
    return np.concatenate([values[rng.integers(len(values), size=(n, len(values)))].mean(1) for n in counts])


def sign_test(better: int, worse: int) -> float:
    """Two-sided p-value of so many signs under a fair coin, exact; ties are left out (Conover 1999, section 3.4)."""
    n, fewer = better + worse, min(better, worse)
    logs = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(fewer + 1))
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))
