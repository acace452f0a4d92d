"""The papers' formulas, read literally in float64: a sum is a Python loop, a token is a scalar.

The function of an objective maps the trained tokens of a batch, by response, to two dicts with token indices as keys:
the objective's value (0-d, differentiable) and whether the token keeps its gradient.
"""

from __future__ import annotations

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
        self.l = clip(raw, -LIMIT, LIMIT)
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


def clip(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.clamp(x, low, high)


def sg(x: torch.Tensor) -> torch.Tensor:
    return x.detach()


def ppo(ratio: torch.Tensor, a: float, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * a, clip(ratio, low, high) * a)


def past_bound(ratio: torch.Tensor, a: float, low: float, high: float) -> bool:
    return (a > 0 and ratio.item() > high) or (a < 0 and ratio.item() < low)


def grpo(rs, eps_low=0.2, eps_high=0.2):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            value[t.index] = ppo(t.rho, t.a, 1 - eps_low, 1 + eps_high)
            kept[t.index] = not past_bound(t.rho, t.a, 1 - eps_low, 1 + eps_high) and not t.clamped
    return value, kept


def dapo(rs):
    return grpo(rs, 0.2, 0.28)


def gppo(rs, eps_low=0.2, eps_high=0.28):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            low, high = ((1 + side) / sg(t.rho) * t.rho for side in (-eps_low, eps_high))
            bounded = torch.maximum(torch.minimum(t.rho, high), low)
            # not torch.minimum, which takes half of each gradient where the two numbers are equal
            value[t.index] = bounded * t.a if past_bound(t.rho, t.a, 1 - eps_low, 1 + eps_high) else t.rho * t.a
            kept[t.index] = not t.clamped
    return value, kept


def gspo(rs, eps=2e-3):
    """Each token carries the objective of its response (`gspo_sequence`), which is then the mean over its tokens."""
    value, kept = {}, {}
    for o in rs:
        if not o:
            continue
        s = torch.exp(sum(t.l for t in o) / len(o))
        for t in o:
            # the token form: value of s_i, gradient through this token alone
            s_t = sg(s) * torch.exp(t.l - sg(t.l))
            value[t.index] = ppo(s_t, t.a, 1 - eps, 1 + eps)
            kept[t.index] = not past_bound(s, t.a, 1 - eps, 1 + eps) and not t.clamped
    return value, kept


def gspo_sequence(rs, eps=2e-3):
    """Eq. 5: one value for each response with trained tokens."""
    values = []
    for o in rs:
        if o:
            s = torch.exp(sum(t.l for t in o) / len(o))
            values.append(ppo(s, o[0].a, 1 - eps, 1 + eps))
    return values


def cispo(rs, eps_low=1.0, eps_high=4.0):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            value[t.index] = sg(clip(t.rho, 1 - eps_low, 1 + eps_high)) * t.a * t.logprob
            kept[t.index] = True
    return value, kept


def prefix_min(o, position) -> float:
    m = None
    for t in o[:position]:
        m = t.rho_value if m is None else min(m, t.rho_value)
    return 1.0 if m is None else m


def minpro(rs, eps_low=1.0, eps_high=4.0):
    value, kept = {}, {}
    for o in rs:
        for i, t in enumerate(o):
            weight = sg(clip(prefix_min(o, i) * t.rho, 1 - eps_low, 1 + eps_high))
            value[t.index] = weight * t.a * t.logprob
            kept[t.index] = True
    return value, kept


def prefix_ratio_grpo(rs, eps=0.2):
    value, kept = {}, {}
    for o in rs:
        for i, t in enumerate(o):
            r = prefix_min(o, i) * t.rho
            value[t.index] = ppo(r, t.a, 1 - eps, 1 + eps)
            kept[t.index] = not past_bound(r, t.a, 1 - eps, 1 + eps) and not t.clamped
    return value, kept


def mu_grpo(rs, scope="sequence", threshold=1e-4, ratio_min=0.0, ratio_max=5.0):
    value, kept = {}, {}
    for o in rs:
        triggers = [i for i, t in enumerate(o) if t.a < 0 and t.rho_value < threshold]
        if not triggers:
            vetoed = set()
        elif scope == "trigger":
            vetoed = set(triggers)
        elif scope == "suffix":
            vetoed = set(range(triggers[0] + 1, len(o)))
        elif scope == "non_trigger_suffix":
            vetoed = set(range(triggers[0] + 1, len(o))) - set(triggers)
        else:
            vetoed = set(range(len(o)))
        for i, t in enumerate(o):
            keep = 0.0 if i in vetoed else 1.0
            value[t.index] = keep * ppo(t.rho, t.a, ratio_min, ratio_max)
            kept[t.index] = keep == 1 and not past_bound(t.rho, t.a, ratio_min, ratio_max) and not t.clamped
    return value, kept


def trust_region(rs) -> list[Token]:
    return [t for o in rs for t in o if (t.a > 0 and t.rho_value > 1) or (t.a < 0 and t.rho_value < 1)]


def m2po(rs, threshold=0.04):
    """Algorithm 1: drop the arg max of l^2 (the first of equals) until the mean is at most the threshold."""
    m = {t.index: True for o in rs for t in o}
    region = trust_region(rs)
    while region and sum(t.l_value**2 for t in region) / len(region) > threshold:
        j = max(range(len(region)), key=lambda i: region[i].l_value ** 2)
        m[region[j].index] = False
        del region[j]
    value = {t.index: float(m[t.index]) * t.rho * t.a for o in rs for t in o}
    return value, {t.index: m[t.index] and not t.clamped for o in rs for t in o}


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
    value, kept = {}, {}
    for o in rs:
        for t in o:
            value[t.index] = ppo(t.rho, t.a, low, high)
            kept[t.index] = not past_bound(t.rho, t.a, low, high) and not t.clamped
    return value, kept


def bapo_bounds(rs, rho0=0.4, low=0.6, low_end=0.9, low_step=0.02, high=1.2, high_end=3.0, high_step=0.05):
    tokens = [t for o in rs for t in o]

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
    while contribution() < rho0 and low + low_step <= low_end + tiny:
        if high_end == math.inf and high >= most:  # the loop would never end: nothing is clipped above
            return low, math.inf
        if high + high_step <= high_end + tiny:
            high += high_step
        else:
            low += low_step
    return low, high


def bapo_released_bounds(rs, target=0.4, low=0.6, low_end=0.9, low_step=0.02, high=1.2, high_end=3.0, high_step=0.05):
    tokens = [t for o in rs for t in o]

    def ratio() -> float:
        effective = [(min(t.rho_value, high) if t.a >= 0 else max(t.rho_value, low)) * t.a for t in tokens]
        positive, negative = sum(max(e, 0.0) for e in effective), -sum(min(e, 0.0) for e in effective)
        return math.inf if negative <= 0 else positive / (negative + 1e-8)

    tiny = 1e-9
    while ratio() < target and low < low_end - tiny:
        low = min(low + low_step, low_end)
    most = max((t.rho_value for t in tokens), default=0.0)
    while ratio() < target and high < high_end - tiny:
        if high_end == math.inf and high >= most:
            return low, math.inf
        high = min(high + high_step, high_end)
    return low, high


def bapo(rs, **settings):
    low, high = bapo_bounds(rs, **settings)
    value, kept = {}, {}
    for o in rs:
        for t in o:
            value[t.index] = ppo(t.rho, t.a, low, high)
            kept[t.index] = not past_bound(t.rho, t.a, low, high) and not t.clamped
    return value, kept


def bapo_released(rs, **settings):
    low, high = bapo_released_bounds(rs, **settings)
    value, kept = {}, {}
    for o in rs:
        for t in o:
            inner = ppo(t.rho, t.a, low, high)
            capped = t.a < 0 and inner.item() < 3 * t.a
            value[t.index] = torch.maximum(inner, torch.tensor(3 * t.a, dtype=torch.float64)) if t.a < 0 else inner
            kept[t.index] = not past_bound(t.rho, t.a, low, high) and not capped and not t.clamped
    return value, kept


def topr(rs):
    value, kept = {}, {}
    for o in rs:
        sequence = math.prod(t.rho_value for t in o)
        for t in o:
            weight = 1.0 if t.a > 0 else min(max(sequence, 0.0), 1.0)
            value[t.index] = weight * t.a * t.logprob
            kept[t.index] = True
    return value, kept


def decoupled_ppo(rs, eps=0.2):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            weight = math.exp(min(max(t.old - t.rollout, -LIMIT), LIMIT))
            raw = t.logprob - t.old
            r = torch.exp(clip(raw, -LIMIT, LIMIT))
            value[t.index] = weight * ppo(r, t.a, 1 - eps, 1 + eps)
            kept[t.index] = not past_bound(r, t.a, 1 - eps, 1 + eps) and abs(raw.item()) <= LIMIT
    return value, kept


def reinforce(rs):
    value = {t.index: t.rho * t.a for o in rs for t in o}
    return value, {t.index: not t.clamped for o in rs for t in o}


def dcpo(rs, eps_low=0.16, eps_high=0.2, most=10.0):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            q = math.exp(t.rollout)
            low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * eps_low / q, 0))
            high = min(0.5 + 0.5 * math.sqrt(1 + 4 * eps_high / q), most)
            inner = ppo(t.rho, t.a, low, high)
            capped = t.a < 0 and inner.item() < most * t.a
            value[t.index] = torch.maximum(inner, torch.tensor(most * t.a, dtype=torch.float64)) if t.a < 0 else inner
            kept[t.index] = not past_bound(t.rho, t.a, low, high) and not capped and not t.clamped
    return value, kept


def full_prefix(rs, eps_low=1.0, eps_high=4.0):
    value, kept = {}, {}
    for o in rs:
        for i, t in enumerate(o):
            whole = math.exp(min(sum(s.l_value for s in o[: i + 1]), 700.0))
            value[t.index] = min(max(whole, 1 - eps_low), 1 + eps_high) * t.a * t.logprob
            kept[t.index] = True
    return value, kept


def cppo(rs, delta=0.2, delta_b=0.02, w_min=0.8):
    """Algorithm 1."""
    value, kept = {}, {}
    for o in rs:
        total_z = total_w = 0.0
        for i, t in enumerate(o):
            w = 1 - (1 - w_min) / max(len(o) - 1, 1) * i
            z = w * abs(math.exp(max(t.rollout, -80.0)) * (t.rho_value - 1))
            most = min(delta, delta + delta_b * total_w - total_z)
            kept[t.index] = (t.a * t.l_value <= 0 or z <= most) and not t.clamped
            value[t.index] = t.rho * t.a * float(t.a * t.l_value <= 0 or z <= most)
            total_z, total_w = total_z + z, total_w + w
    return value, kept


def ctpo(rs, eps_low=0.025, eps_high=0.05):
    value, kept = {}, {}
    for o in rs:
        for i, t in enumerate(o):
            whole = math.exp(min(max(sum(s.l_value for s in o[: i + 1]), -80.0), 80.0))
            c = whole * torch.exp(t.l - sg(t.l))
            low, high = math.exp(-eps_low * math.sqrt(i + 1)), math.exp(eps_high * math.sqrt(i + 1))
            value[t.index] = ppo(c, t.a, low, high)
            kept[t.index] = not past_bound(c, t.a, low, high) and not t.clamped
    return value, kept


def drpo(rs, epsilon=12.5):
    value = {}
    for t in (t for o in rs for t in o):
        mu = math.exp(max(t.rollout, -80.0))
        value[t.index] = t.rho * t.a - abs(t.a) * mu * (t.rho - 1) ** 2 / (2 * epsilon)
    return value, {t.index: not t.clamped for o in rs for t in o}


def oapl(rs, beta=1e-3):
    """The token form, whose gradients add up to that of `oapl_sequence`."""
    value = {}
    for o in rs:
        s = sum(t.l_value for t in o)
        for t in o:
            value[t.index] = (t.a - beta * s) * t.logprob
    return value, {t.index: True for o in rs for t in o}


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
    value, kept = cispo(rs, eps_low, eps_high)
    kept = {index: sums[index] >= lowest for index in kept}
    return {index: value[index] * float(kept[index]) for index in value}, kept


def prefix_ratio_grpo_full(rs, eps=0.2):
    """Eq. 3-5 without a stop-gradient: gradients also go through the minimum, to the first token that attains it."""
    value, kept = {}, {}
    for o in rs:
        for i, t in enumerate(o):
            r = min(o[:i], key=lambda s: s.rho_value).rho * t.rho if i else t.rho
            value[t.index] = ppo(r, t.a, 1 - eps, 1 + eps)
            kept[t.index] = not past_bound(r, t.a, 1 - eps, 1 + eps) and not t.clamped
    return value, kept


def sapo(rs, positive=1.0, negative=1.05):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            tau = positive if t.a > 0 else negative
            # not torch.sigmoid, whose gradient is imprecise where 1 - sigmoid(x) is small
            value[t.index] = 4 / tau / (1 + torch.exp(-tau * (t.rho - 1))) * t.a
            kept[t.index] = not t.clamped
    return value, kept


def dppo(rs, divergence="tv", threshold=0.15, most=10.0):
    value, kept = {}, {}
    for o in rs:
        for t in o:
            q, p = math.exp(min(t.rollout, 0)), math.exp(min(min(t.rollout, 0) + t.l_value, 0))
            if divergence == "tv":
                d = abs(q * t.rho_value - q)
            else:
                d = -q * t.l_value + (1 - q + 1e-8) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            along = (t.a > 0 and t.l_value > 0) or (t.a < 0 and t.l_value < 0)
            kept[t.index] = not (along and d > threshold)
            value[t.index] = sg(clip(t.rho, 0.0, most)) * t.a * t.logprob * float(kept[t.index])
    return value, kept


def vespo(rs, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    value, kept = {}, {}
    for o in rs:
        w = math.exp(min(max(sum(t.l_value for t in o), -LIMIT), LIMIT))
        for t in o:
            k, scale = negative if t.a < 0 else positive
            value[t.index] = w**k * math.exp(scale * (1 - w)) * t.a * t.logprob
            kept[t.index] = True
    return value, kept


def trm(rs, estimator="k2", threshold=2.5):
    value, kept = {}, {}
    for o in rs:
        d = [t.l_value**2 / 2 if estimator == "k2" else math.expm1(t.l_value) - t.l_value for t in o]
        inside = all(x <= threshold for x in d)
        for t in o:
            value[t.index] = t.rho * t.a * float(inside)
            kept[t.index] = inside and not t.clamped
    return value, kept
