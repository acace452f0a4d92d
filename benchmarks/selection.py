"""Batch statistics: M2PO's mask and BAPO's bounds by integer histograms, compared with sorting and released loops.

    python benchmarks/selection.py [--tokens 65536 1048576 16777216] [--threads 1] [--repeats 5]

All ways run in one process and take turns; the least time counts (on a CPU, CPU time of all threads). The loops work
like the released codes: M2PO goes through the sorted squares with one ``.item()`` per step; BAPO evaluates both
contributions over all tokens for every state of its bounds. They run for up to --loop-tokens tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from token_pass import make_batch, take_turns

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES
from megarl.objectives.parts.ratios import log_ratio


def m2_ways(batch: TokenBatch, backends: list[str], loop: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to compute the largest |l| that keeps its gradient under M2PO's Algorithm 1 with threshold .04.

    The released loop alone solves the released code's own equation instead, which takes as many steps.
    """

    def squares() -> torch.Tensor:
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        in_trust_region = batch.loss_mask & (l * batch.advantages > 0)
        return l[in_trust_region].double().square().sort().values

    def sort_and_cumsum() -> torch.Tensor:
        ordered = squares()
        means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
        return ordered[(means <= 0.04).sum()].sqrt()

    def released_loop() -> torch.Tensor:
        ordered = squares()
        below, total = ordered.cumsum(0), ordered.numel()
        for k in range(total):
            if (below[k] + ordered[k] * (total - k - 1)).item() >= 0.04 * total:
                return ordered[max(k - 1, 0)].sqrt()
        return ordered[-1].sqrt()

    objective = OBJECTIVES["m2po"]()
    ways: dict[str, Callable[[], torch.Tensor]] = {"sort + cumsum": sort_and_cumsum}
    for backend in ("torch", *backends):
        ways[backend] = lambda backend=backend: objective.statistics(batch, None, backend)[0]
    return ways | ({"released loop": released_loop} if loop else {})


def bapo_ways(batch: TokenBatch, backends: list[str], loop: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to compute c_low for a target that no bounds reach, so that the search visits every state, as on old data.

    The loop is that of the paper's Algorithm 1.
    """
    target = 1.0

    def loop_over_states() -> torch.Tensor:
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        ratio, a = l.exp(), batch.advantages
        weight = torch.where(batch.loss_mask, batch.rollout_logprobs.exp(), 0)
        low, high = 0.6, 1.2
        while True:
            above = (weight * torch.minimum(ratio * a, ratio.clamp(0, high) * a).abs())[a > 0].sum()
            whole = (weight * torch.minimum(ratio * a, ratio.clamp(low, high) * a).abs()).sum()
            if (above / whole).item() >= target or low + 0.02 > 0.9 + 1e-9:
                return torch.tensor(low, dtype=torch.float64)
            if high + 0.05 <= 3.0 + 1e-9:
                high += 0.05
            else:
                low += 0.02

    objective = OBJECTIVES["bapo"](positive_target=target)
    ways: dict[str, Callable[[], torch.Tensor]] = {}
    for backend in ("torch", *backends):
        ways[backend] = lambda backend=backend: objective.statistics(batch, None, backend)[0]
    return ways | ({"released loop": loop_over_states} if loop else {})


def measure(
    name: str, tokens: int, device: torch.device, backends: list[str], repeats: int, loop: bool
) -> dict[str, Any]:
    batch = make_batch(tokens, device).detach()
    ways = {"m2po": m2_ways, "bapo": bapo_ways}[name](batch, backends, loop)
    expected = float(ways["torch"]())

    def check(way: str) -> None:
        found = float(ways[way]())
        if (name, way) != ("m2po", "released loop"):  # which solves another equation
            assert math.isclose(found, expected, rel_tol=1e-6), f"{found}, not {expected}"

    right, failures = common.attempt({way: partial(check, way) for way in ways})
    seconds = take_turns({way: ways[way] for way in right}, repeats, device)
    row: dict[str, Any] = {"statistics": name, "tokens": tokens, "device": device.type}
    row |= {f"{way} ms": 1e3 * seconds[way] if way in right else "failed" for way in ways}
    row["failed"] = "; ".join(failures.values())
    for way in ("sort + cumsum", "released loop"):
        if way in seconds:
            row |= {f"{way}/{name}": seconds[way] / seconds[name] for name in backends if name in seconds}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 16, 1 << 20, 1 << 24])
    parser.add_argument("--loop-tokens", type=int, default=1 << 16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = common.parse_with_threads(parser)
    rows = [
        measure(name, tokens, torch.device("cpu"), ["cpp"], arguments.repeats, tokens <= arguments.loop_tokens)
        for name in ("m2po", "bapo")
        for tokens in arguments.tokens
    ]
    common.write_table("selection_cpu", rows)


if __name__ == "__main__":
    main()
