"""Estimates from right and wrong responses to a sample of prompts: avg@k, pass@k, maj@k, their intervals, differences.

The prompt is the unit of every interval, because the responses to one prompt are correlated: more samples make the
score of each prompt more precise, but only more prompts say more about prompts that were not drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Interval = list[float]  # [low, high] of a 95 % interval
RESAMPLES = 10_000  # number of bootstrap resamples


def summarise(correct: np.ndarray, answers: Sequence[Sequence[str | None]] | None = None) -> dict[str, object]:
    """The metrics of one evaluation. correct: [prompts, n], 1 for a right response, else 0; answers: the extracted
    answer of each response, None where there is none; without ``answers`` maj@n is left out.

    ``accuracy`` is avg@n, ``pass_at`` pass@k for k = 1 to n, ``maj_at_k`` maj@n; each with its 95 % interval. For
    n = 1 all of them equal the accuracy, so only the accuracy is returned.
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
    """[prompts, n] of 1 and 0 -> [prompts, n], pass@k of each prompt for k = 1 to n: the probability that at least one
    of k of its n responses, drawn without replacement, is right.

    1 - C(n - c, k) / C(n, k) with c right responses, the unbiased estimator of pass@k: Chen et al. 2021 (arXiv
    2107.03374), Equation 1.
    """
    n = correct.shape[1]
    wrong, drawn = (n - correct.sum(1))[:, None], np.arange(n)[None]
    # factor k is the chance that draw k is wrong if all before it were; it is 0 once the wrong responses are used up
    return 1 - np.cumprod(np.maximum(wrong - drawn, 0) / (n - drawn), axis=1)


def majority(correct: np.ndarray, answers: Sequence[str | None]) -> float:
    """maj@n of one prompt (Wang et al. 2022, arXiv 2203.11171): 1 if its most frequent answer is right, else 0.

    correct: [n], 1 or 0. All right responses vote for the same answer, whatever their texts; wrong responses vote for
    the answer they give, and those without an answer do not vote. Ties are broken at random: the result is then the
    probability that the right answer is drawn.
    """
    right = int(correct.sum())
    votes = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if answer and not is_right)
    most = max(votes.values(), default=0)
    if right != most or right == 0:
        return float(right > most)
    return 1 / (1 + sum(count == most for count in votes.values()))


def interval(scores: np.ndarray, samples: int = 1) -> Interval:
    """95 % interval of the mean of ``scores`` [prompts], in [0, 1], each the mean over ``samples`` responses.

    Samples of one prompt are correlated, so the prompt is the unit. With one sample it is Wilson's interval, made for
    scores of 0 and 1 and too wide for others. With several it is Wilson's with three changes: the scores' own variance,
    Student's t in place of the normal distribution, and one more prompt that is right half of the time, because a few
    prompts that happen to agree say little about how prompts differ. The interval has a positive width even at accuracy
    0 and 1, stays inside [0, 1], and covers the truth in at least 94 % of cases, from 2 prompts on.
    """
    n, mean, z = len(scores), float(scores.mean()), NormalDist().inv_cdf(0.975)
    n_effective = float(n)  # number of independent coin tosses that would give a mean of the same variance
    if samples > 1:
        z, mean = _student_t(n - 1), float((scores.sum() + 0.5) / (n + 1))
        variance = float(((scores - mean) ** 2).sum() + (0.5 - mean) ** 2) / n
        n_effective = min(n * mean * (1 - mean) / variance, n * samples) if variance > 0 else n * samples
    centre = (mean + z * z / (2 * n_effective)) / (1 + z * z / n_effective)
    half = z / (1 + z * z / n_effective) * math.sqrt(mean * (1 - mean) / n_effective + z * z / (4 * n_effective**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mean_of_replicates(values: np.ndarray) -> tuple[float, Interval]:
    """Mean of ``values``, one for each of at least two replicates (seeds, batches), and Student's 95 % interval for
    the mean over infinitely many replicates."""
    n, mean = len(values), float(values.mean())
    half = _student_t(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return mean, [mean - half, mean + half]


def _student_t(freedom: int) -> float:
    """The .975 quantile of Student's t, accurate to 1 %: exact for 1 and 2 degrees of freedom, an expansion for more
    (Abramowitz, Stegun 26.7.5).

    With 0 degrees of freedom the variance cannot be estimated: 1e6, so that the interval spans everything. scipy has
    the exact quantile, but megarl needs nothing else of its 35 MB.
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
    """The scores of B minus those of A on the same prompts."""

    mean: float
    ci95: Interval
    better: int  # prompts on which B has the higher score
    worse: int
    p_value: float  # two-sided, of `sign_test`

    def text(self) -> str:
        """The mean with its interval."""
        return f"{self.mean:+.3f} [{self.ci95[0]:+.3f}, {self.ci95[1]:+.3f}]"


def paired(a: np.ndarray, b: np.ndarray) -> Difference:
    """Difference ``b`` - ``a`` of two scores for each prompt, [prompts] each; differences between prompts cancel.

    The interval is a percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13).
    """
    difference = b - a
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    rng, n = np.random.default_rng(0), len(difference)
    size = max(1, (1 << 22) // n)  # resamples at a time, to bound the memory
    counts = [min(size, RESAMPLES - begun) for begun in range(0, RESAMPLES, size)]
    means = np.concatenate([difference[rng.integers(n, size=(count, n))].mean(1) for count in counts])
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(difference.mean()), [float(low), float(high)], better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Exact two-sided p-value of the sign test; ties are in neither count (Conover 1999, section 3.4)."""
    n, fewer = better + worse, min(better, worse)
    logs = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(fewer + 1))
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))
