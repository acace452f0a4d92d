"""The papers' formulas, read literally in float64: a sum is a Python loop, a token is a scalar.

The function of an objective maps the trained tokens of a batch, by response, to two dicts with token indices as keys:
the objective's value (0-d, differentiable) and whether the token keeps its gradient.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import torch

from megarl.batch import TokenBatch

LIMIT = 20.0


class Token:
    """A trained token: ``l`` is its clamped log-ratio and ``rho`` its ratio, both differentiable."""

    def __init__(self, index: int, logprob: torch.Tensor, rollout: float, old: float, a: float) -> None:
        self.index, self.logprob, self.rollout, self.old, self.a = index, logprob, rollout, old, a
        raw = logprob - rollout
        self.clamped = abs(raw.item()) > LIMIT
        self.l = torch.clamp(raw, -LIMIT, LIMIT)
        self.rho = torch.exp(self.l)
        self.l_value, self.rho_value = self.l.item(), self.rho.item()


def responses(batch: TokenBatch, logprobs: torch.Tensor) -> list[list[Token]]:
    """The trained tokens of each response; logprobs: [T] float64 with gradient."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.loss_mask.tolist()
    columns = zip(
        logprobs.unbind(),
        batch.rollout_logprobs.tolist(),
        batch.old_logprobs.tolist(),
        batch.advantages.tolist(),
        strict=True,
    )
    tokens = [Token(i, *column) if mask[i] else None for i, column in enumerate(columns)]
    return [[t for t in tokens[a:b] if t is not None] for a, b in pairwise(bounds)]


def tokenwise(formula):
    """The function of an objective from its formula of a token: (response, its place in it, settings) -> the pair."""

    @functools.wraps(formula)
    def of_batch(rs, *settings, **named):
        pairs = {t.index: formula(o, i, *settings, **named) for o in rs for i, t in enumerate(o)}
        values, kept = ({index: pair[i] for index, pair in pairs.items()} for i in range(2))
        return values, kept

    return of_batch


def within(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(t: Token, ratio: torch.Tensor, low: float, high: float, clamped: bool | None = None):
    """min(r A, clip(r) A), and whether the gradient survives. clamped: whether the ratio is; None: as rho."""
    past_bound = (t.a > 0 and ratio.item() > high) or (t.a < 0 and ratio.item() < low)
    kept = not past_bound and not (t.clamped if clamped is None else clamped)
    return torch.minimum(ratio * t.a, torch.clamp(ratio, low, high) * t.a), kept


def dual_clip(t: Token, inner: torch.Tensor, kept: bool, most: float) -> tuple[torch.Tensor, bool]:
    capped = t.a < 0 and inner.item() < most * t.a
    return torch.full_like(inner, most * t.a) if capped else inner, kept and not capped


def own_ratio(t: Token, value: float) -> torch.Tensor:
    """A ratio of several tokens with its value, whose gradient goes through this token alone."""
    return value * torch.exp(t.l - t.l.detach())


@tokenwise
def reinforce(o, i):
    return o[i].rho * o[i].a, not o[i].clamped


def clipped(rs, low, high):
    return tokenwise(lambda o, i: ppo(o[i], o[i].rho, low, high))(rs)


def grpo(rs, eps_low=0.2, eps_high=0.2):
    return clipped(rs, 1 - eps_low, 1 + eps_high)


def dapo(rs):
    return grpo(rs, 0.2, 0.28)


@tokenwise
def gppo(o, i, eps_low=0.2, eps_high=0.28):
    t = o[i]
    bound = 1 + eps_high if t.a > 0 else 1 - eps_low
    past_bound = (t.rho_value - bound) * t.a > 0
    return (bound / t.rho.detach() if past_bound else 1) * t.rho * t.a, not t.clamped


@tokenwise
def gspo(o, i, eps=2e-3):
    """Each token carries the objective of its response (`gspo_sequence`), which is then the mean over its tokens."""
    s = math.exp(sum(t.l_value for t in o) / len(o))
    return ppo(o[i], own_ratio(o[i], s), 1 - eps, 1 + eps)


def gspo_sequence(rs, eps=2e-3):
    """Eq. 5: one loss for each response with trained tokens."""
    return [-ppo(o[0], torch.exp(sum(t.l for t in o) / len(o)), 1 - eps, 1 + eps)[0] for o in rs if o]


@tokenwise
def cispo(o, i, eps_low=1.0, eps_high=4.0):
    return within(o[i].rho_value, 1 - eps_low, 1 + eps_high) * o[i].a * o[i].logprob, True


def prefix_min(o, i) -> float:
    return min((t.rho_value for t in o[:i]), default=1.0)


@tokenwise
def minpro(o, i, eps_low=1.0, eps_high=4.0):
    weight = within(prefix_min(o, i) * o[i].rho_value, 1 - eps_low, 1 + eps_high)
    return weight * o[i].a * o[i].logprob, True


@tokenwise
def prefix_ratio_grpo(o, i, eps=0.2):
    return ppo(o[i], prefix_min(o, i) * o[i].rho, 1 - eps, 1 + eps)


@tokenwise
def prefix_ratio_grpo_full(o, i, eps=0.2):
    """Eq. 3-5 without a stop-gradient: gradients also go through the minimum, to the first token that attains it."""
    least = min(o[:i], key=lambda s: s.rho_value).rho if i else 1
    return ppo(o[i], least * o[i].rho, 1 - eps, 1 + eps)


@tokenwise
def mu_grpo(o, i, scope="sequence", threshold=1e-4, ratio_min=0.0, ratio_max=5.0):
    triggers = [k for k, t in enumerate(o) if t.a < 0 and t.rho_value < threshold]
    vetoed = (
        bool(triggers)
        and {
            "sequence": True,
            "suffix": i > min(triggers, default=0),
            "non_trigger_suffix": i > min(triggers, default=0) and i not in triggers,
            "trigger": i in triggers,
        }[scope]
    )
    value, kept = ppo(o[i], o[i].rho, ratio_min, ratio_max)
    return value * float(not vetoed), kept and not vetoed


def trust_region(rs) -> list[Token]:
    return [t for o in rs for t in o if (t.a > 0 and t.rho_value > 1) or (t.a < 0 and t.rho_value < 1)]


def m2po(rs, threshold=0.04):
    """Algorithm 1: drop the arg max of l^2 (the first of equals) until the mean is at most the threshold."""
    region, masked = trust_region(rs), set()
    while region and sum(t.l_value**2 for t in region) / len(region) > threshold:
        j = max(range(len(region)), key=lambda i: region[i].l_value ** 2)
        masked.add(region.pop(j).index)
    value, kept = reinforce(rs)
    value = {index: float(index not in masked) * v for index, v in value.items()}
    return value, {index: k and index not in masked for index, k in kept.items()}


def m2po_released(rs, threshold=0.04):
    """The authors' `_solve_tau_from_sorted_delta2`, without its guards of 1e-12, and their PPO clip."""
    squares = sorted(t.l_value**2 for t in trust_region(rs))
    low, high = 0.0, math.inf
    if squares and sum(squares) / len(squares) > threshold:
        tau = 0.0
        for k, v in enumerate(squares):
            if v * (len(squares) - k - 1) + sum(squares[: k + 1]) >= threshold * len(squares):
                tau = 0.0 if k == 0 else squares[k - 1] ** 0.5
                break
        # a token exactly at the level keeps its gradient, but exp(l) and exp(tau) may differ in their last bit
        low, high = math.exp(-tau) * (1 - 1e-12), math.exp(tau) * (1 + 1e-12)
    return clipped(rs, low, high)


def bapo_bounds(
    rs, positive_target=0.4, low_start=0.6, low_end=0.9, low_step=0.02, high_start=1.2, high_end=3.0, high_step=0.05
):
    tokens, low, high = [t for o in rs for t in o], low_start, high_start

    def contribution() -> float:
        above = below = 0.0
        for t in tokens:
            pi, rho = math.exp(t.rollout), t.rho_value
            if t.a > 0:
                above += pi * abs(min(rho * t.a, min(max(rho, 0), high) * t.a))
            below += pi * abs(min(rho * t.a, min(max(rho, low), high) * t.a))
        return above / below if below else math.nan

    tiny = 1e-9  # .6 + 15 * .02 must count as .9
    most = max((t.rho_value for t in tokens), default=0.0)
    while contribution() < positive_target and low + low_step <= low_end + tiny:
        if high_end == math.inf and high >= most:  # the loop would never end: nothing is clipped above
            return low, math.inf
        if high + high_step <= high_end + tiny:
            high += high_step
        else:
            low += low_step
    return low, high


def bapo_released_bounds(
    rs, positive_target=0.4, low_start=0.6, low_end=0.9, low_step=0.02, high_start=1.2, high_end=3.0, high_step=0.05
):
    tokens, low, high = [t for o in rs for t in o], low_start, high_start

    def ratio() -> float:
        effective = [(min(t.rho_value, high) if t.a >= 0 else max(t.rho_value, low)) * t.a for t in tokens]
        positive, negative = sum(max(e, 0.0) for e in effective), -sum(min(e, 0.0) for e in effective)
        return math.inf if negative <= 0 else positive / (negative + 1e-8)

    tiny = 1e-9
    while ratio() < positive_target and low < low_end - tiny:
        low = min(low + low_step, low_end)
    most = max((t.rho_value for t in tokens), default=0.0)
    while ratio() < positive_target and high < high_end - tiny:
        if high_end == math.inf and high >= most:
            return low, math.inf
        high = min(high + high_step, high_end)
    return low, high


def bapo(rs, **settings):
    low, high = bapo_bounds(rs, **settings)
    return clipped(rs, low, high)


def bapo_released(rs, **settings):
    low, high = bapo_released_bounds(rs, **settings)
    return tokenwise(lambda o, i: dual_clip(o[i], *ppo(o[i], o[i].rho, low, high), 3.0))(rs)


@tokenwise
def topr(o, i, most=1.0):
    weight = 1.0 if o[i].a > 0 else within(math.prod(t.rho_value for t in o), 0.0, most)
    return weight * o[i].a * o[i].logprob, True


@tokenwise
def decoupled_ppo(o, i, most=math.inf, eps=0.2):
    t = o[i]
    weight, raw = min(math.exp(within(t.old - t.rollout, -LIMIT, LIMIT)), most), t.logprob - t.old
    r = torch.exp(torch.clamp(raw, -LIMIT, LIMIT))
    value, kept = ppo(t, r, 1 - eps, 1 + eps, clamped=abs(raw.item()) > LIMIT)
    return weight * value, kept


@tokenwise
def dcpo(o, i, eps_low=0.16, eps_high=0.2, most=10.0):
    t, q = o[i], math.exp(o[i].rollout)
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * eps_low / q, 0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 4 * eps_high / q), most)
    return dual_clip(t, *ppo(t, t.rho, low, high), most)


@tokenwise
def full_prefix(o, i, eps_low=1.0, eps_high=4.0):
    whole = math.exp(min(sum(s.l_value for s in o[: i + 1]), 700.0))
    return within(whole, 1 - eps_low, 1 + eps_high) * o[i].a * o[i].logprob, True


@tokenwise
def cppo(o, i, delta=0.2, delta_b=0.02, w_min=0.8):
    """Algorithm 1."""
    w = [1 - (1 - w_min) / max(len(o) - 1, 1) * k for k in range(len(o))]
    z = [w[k] * abs(math.exp(max(t.rollout, -80.0)) * (t.rho_value - 1)) for k, t in enumerate(o)]
    most = min(delta, delta + delta_b * sum(w[:i]) - sum(z[:i]))
    inside = o[i].a * o[i].l_value <= 0 or z[i] <= most
    return o[i].rho * o[i].a * float(inside), inside and not o[i].clamped


@tokenwise
def ctpo(o, i, eps_low=0.025, eps_high=0.05):
    c = own_ratio(o[i], math.exp(within(sum(s.l_value for s in o[: i + 1]), -80.0, 80.0)))
    return ppo(o[i], c, math.exp(-eps_low * math.sqrt(i + 1)), math.exp(eps_high * math.sqrt(i + 1)))


@tokenwise
def drpo(o, i, epsilon=12.5):
    t, mu = o[i], math.exp(max(o[i].rollout, -80.0))
    return t.rho * t.a - abs(t.a) * mu * (t.rho - 1) ** 2 / (2 * epsilon), not t.clamped


@tokenwise
def oapl(o, i, beta=1e-3):
    """The token form, whose gradients add up to that of `oapl_sequence`."""
    return (o[i].a - beta * sum(t.l_value for t in o)) * o[i].logprob, True


def oapl_sequence(rs, beta=1e-3):
    """Eq. 3: one squared error for each response with trained tokens, times a constant."""
    return [(beta * sum(t.l for t in o) - o[0].a) ** 2 / (2 * beta) for o in rs if o]


def prefix_filter(rs, fraction=0.01, eps_low=1.0, eps_high=4.0):
    """Removes the tokens with the lowest prefix sums, but none that equals the lowest one that is kept.

    Sums within 2^-30 count as equal, because a sum of floats depends on the order of its terms.
    """
    sums = {t.index: sum(s.l_value for s in o[: i + 1]) for o in rs for i, t in enumerate(o)}
    ranked = sorted(sums.values())
    removed = int(fraction * len(ranked) + 1e-9)
    lowest = ranked[min(removed, len(ranked) - 1)] - 2.0**-30 if ranked else 0.0
    value, _ = cispo(rs, eps_low, eps_high)
    kept = {index: sums[index] >= lowest for index in value}
    return {index: value[index] * float(kept[index]) for index in value}, kept


@tokenwise
def sapo(o, i, positive=1.0, negative=1.05):
    t, tau = o[i], positive if o[i].a > 0 else negative
    # not torch.sigmoid, whose gradient is imprecise where 1 - sigmoid(x) is small
    return 4 / tau / (1 + torch.exp(-tau * (t.rho - 1))) * t.a, not t.clamped


@tokenwise
def dppo(o, i, divergence="tv", threshold=0.15, most=10.0):
    t = o[i]
    q, p = math.exp(min(t.rollout, 0)), math.exp(min(min(t.rollout, 0) + t.l_value, 0))
    if divergence == "tv":
        d = abs(q * t.rho_value - q)
    else:
        d = -q * t.l_value + (1 - q + 1e-8) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    kept = not (t.a * t.l_value > 0 and d > threshold)
    return within(t.rho_value, 0.0, most) * t.a * t.logprob * float(kept), kept


@tokenwise
def vespo(o, i, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    w = math.exp(within(sum(t.l_value for t in o), -LIMIT, LIMIT))
    k, scale = negative if o[i].a < 0 else positive
    return w**k * math.exp(scale * (1 - w)) * o[i].a * o[i].logprob, True


@tokenwise
def trm(o, i, estimator="k2", threshold=2.5):
    d = [t.l_value**2 / 2 if estimator == "k2" else math.expm1(t.l_value) - t.l_value for t in o]
    inside = all(x <= threshold for x in d)
    return o[i].rho * o[i].a * float(inside), inside and not o[i].clamped
