"""avg@k, pass@k, maj@k and paired differences against closed forms and plain counting; coverage of intervals."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from megarl.estimates import interval, majority, mean_of_replicates, paired, pass_at, sign_test, summarise
from megarl.rewards.answers import LONGEST, answer_of


def test_interval_is_wilsons_for_one_sample_per_prompt():
    scores = np.array([1.0] * 8 + [0.0] * 2)
    z, n, p = 1.959964, 10, 0.8
    centre, half = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = [(centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)]
    assert interval(scores) == pytest.approx(expected, rel=1e-5)
    assert interval(np.zeros(100))[0] == 0.0 < interval(np.zeros(100))[1] < 0.05
    low, high = interval(np.array([0.25]), 32)  # of one prompt: the whole range
    assert low < 1e-6 and high > 1 - 1e-6


@pytest.mark.parametrize("prompts", [2, 5, 12, 30])
@pytest.mark.parametrize("difficulty", [(2, 3), (0.3, 0.3), (0.5, 4), (20, 20)])
def test_interval_covers_the_truth_for_few_prompts_with_many_samples(prompts, difficulty):
    rng = np.random.default_rng(0)
    truth, trials = difficulty[0] / sum(difficulty), 600
    for samples in (4, 32):
        scores = rng.binomial(samples, rng.beta(*difficulty, (trials, prompts))) / samples
        bounds = [interval(row, samples) for row in scores]
        assert sum(low <= truth <= high for low, high in bounds) / trials > 0.92  # 0.95 less three standard errors
        assert all(0 <= low < high <= 1 for low, high in bounds)


def test_pass_at_k_agrees_with_the_closed_form_and_with_counting_all_draws():
    n = 6
    correct = np.array([[1.0] * c + [0.0] * (n - c) for c in range(n + 1)])
    found = pass_at(correct)
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        assert found[c, k - 1] == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-15)
        draws = list(itertools.combinations(correct[c], k))
        assert found[c, k - 1] == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-15)


def test_intervals_of_pass_at_k_cover_the_truth():
    rng, n, prompts = np.random.default_rng(0), 8, 40
    difficulty, hits = rng.beta(1, 3, 200_000), np.zeros(n)
    truth = [(1 - (1 - difficulty) ** k).mean() for k in range(1, n + 1)]
    for _ in range(400):
        right = (rng.random((prompts, n)) < rng.choice(difficulty, prompts)[:, None]).astype(float)
        low, high = np.transpose(summarise(right)["pass_at_ci95"])
        hits += (low <= truth) & (truth <= high)
    assert (hits / 400 > 0.92).all()


@pytest.mark.parametrize(
    ("correct", "answers", "expected"),
    [
        ([1, 1, 0], ["4", "4.0", "5"], 1.0),  # right answers agree, however they are written
        ([1, 0, 0], ["4", "5", "5"], 0.0),
        ([1, 0, 0], ["4", "5", "6"], 1 / 3),
        ([1, 1, 0, 0], ["4", "4", "5", "5"], 0.5),
        ([1, 0, 0, 0], ["4", None, None, None], 1.0),  # no answer, no vote
        ([1], [None], 1.0),
        ([0, 0], [None, None], 0.0),
    ],
)
def test_majority_votes_are_right_as_often_as_expected(correct, answers, expected):
    assert majority(np.array(correct, float), answers) == pytest.approx(expected)


def test_a_summary_has_every_estimate_with_its_interval():
    correct = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    found = summarise(correct, [["a", "b"], ["b", "b"], ["a", "a"], ["c", "a"]])
    assert (found["accuracy"], found["pass_at_k"], found["maj_at_k"]) == (0.5, 0.75, 0.5)
    assert found["pass_at"] == [0.5, 0.75] and (found["prompts"], found["samples"]) == (4, 2)
    assert found["pass_at_ci95"] == [found["ci95"], found["pass_at_k_ci95"]]
    assert found["ci95"] == interval(correct.mean(1), 2) and found["pass_at_k_ci95"] == interval(correct.max(1))
    assert found["maj_at_k_ci95"] == interval(np.array([0.5, 0.0, 1.0, 0.5]))
    assert "maj_at_k" not in summarise(correct) and "pass_at" not in summarise(correct[:, :1])


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (9, 1), (5, 5), (12, 30), (400, 460), (3000, 2800)])
def test_the_sign_test_agrees_with_the_binomial_sum(better, worse):
    n, fewer = better + worse, min(better, worse)
    counts = itertools.accumulate(range(fewer), lambda c, k: c * (n - k) // (k + 1), initial=1)  # C(n, 0), C(n, 1) ..
    exact = float(min(Fraction(2 * sum(counts), 2**n), 1))
    assert sign_test(better, worse) == sign_test(worse, better) == pytest.approx(exact, rel=1e-10)


def test_the_bootstrap_agrees_with_all_possible_resamples():
    a, b = np.array([0.5, 0.0, 0.25, 0.75, 1.0]), np.array([1.0, 0.5, 0.25, 0.5, 1.0])
    everything = np.array([np.mean(drawn) for drawn in itertools.product(b - a, repeat=5)])
    for found, share in zip(paired(a, b).ci95, (0.025, 0.975), strict=True):
        near = [np.quantile(everything, share + 4 * sign * math.sqrt(0.025 * 0.975 / 10_000)) for sign in (-1, 1)]
        assert near[0] <= found <= near[1]
    assert (paired(a, b).better, paired(a, b).worse, paired(a, b).p_value) == (2, 1, 1.0)


@pytest.mark.parametrize(
    ("kind", "response", "expected"),
    [
        ("math", r"so \boxed{3} or rather \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        ("math", "That is $1,234.50.", "1,234.50"),
        ("math", r"no idea: \boxed{", None),
        ("exact", " abc\n", "abc"),
        ("exact", "  ", None),
        ("code", "print(1)", None),
    ],
)
def test_the_final_answer_of_a_response_is_extracted(kind, response, expected):
    assert answer_of(kind, response) == expected


def test_hostile_text_gives_a_short_answer_without_taking_long():
    for text in (r"\boxed{" * 50_000, "{" * 10**6, "1" * 10**6, "1," * 10**6, r"\boxed{}" * 10**5):
        assert len(answer_of("math", text) or "") <= LONGEST


@pytest.mark.parametrize(("number", "t", "rel"), [(4, 3.182446, 1e-2), (5, 2.776445, 3e-3), (10, 2.262157, 2e-4)])
def test_an_interval_over_replicates_is_students(number, t, rel):
    scores = np.arange(number) / number
    mean, ends = mean_of_replicates(scores)
    half = t * scores.std(ddof=1) / number**0.5
    assert [mean - ends[0], ends[1] - mean] == pytest.approx([half, half], rel=rel) and mean == scores.mean()
