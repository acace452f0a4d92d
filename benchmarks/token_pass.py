"""The fused token pass compared with eager torch and torch.compile.

    python benchmarks/token_pass.py [--tokens 1048576 16777216] [--threads 1] [--repeats 5]

All ways compute the same outputs (loss, gradient, kept tokens, every metric, histograms) on the same tokens. They run
in one process and take turns; the least time counts (on a CPU, CPU time of all threads, which other load changes
least). "loss alone" is eager torch without metrics and histograms, the least that training needs. Bytes are those that
a single pass must move per token: 13 read, 9 written, and 4 read and 4 written by the multiplication with the incoming
gradient. `gpu.py` measures the same on a GPU, with launches and host syncs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES
from megarl.objectives.parts.prefix_min import prefix_min_log_ratio
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.sequences import sequence_sum

BYTES = 4 + 4 + 4 + 1 + 4 + 4 + 1 + 8
EDGE = 1e-6  # nats by which a ratio may miss the edge of a clip range
CASES = ("mu_grpo", "minpro", "prefix_ratio_grpo", "m2po", "grpo")


def make_batch(tokens: int, device: torch.device) -> TokenBatch:
    """Random responses of 64 to 8192 tokens, log-ratios with a heavy tail, 10 % of the tokens untrained."""
    g = torch.Generator().manual_seed(tokens)
    lengths = (64 * 128 ** torch.rand(tokens // 512, generator=g)).long()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    cu_seqlens = torch.cat([cu_seqlens[cu_seqlens < tokens], torch.tensor([tokens])]).int()
    logprobs = -torch.rand(tokens, generator=g) * 3
    spread = torch.where(torch.rand(tokens, generator=g) < 0.01, 3.0, 0.15)
    rollout = (logprobs - spread * torch.randn(tokens, generator=g)).clamp(max=0)
    advantages = torch.randn(len(cu_seqlens) - 1, generator=g).repeat_interleave(cu_seqlens.diff().long())
    mask = torch.rand(tokens, generator=g) < 0.9
    tensors = [x.to(device) for x in (logprobs, rollout, advantages, mask, cu_seqlens)]
    return TokenBatch(tensors[0].requires_grad_(), *tensors[1:])


def everything(name: str, backend: str, statistics: Any) -> Callable[[TokenBatch], torch.Tensor]:
    objective = OBJECTIVES[name]()

    def run(batch: TokenBatch) -> torch.Tensor:
        terms = objective(batch, statistics, backend)
        return torch.autograd.grad(terms.loss.sum(), batch.logprobs)[0]

    return run


def shifted(batch: TokenBatch, by: float) -> TokenBatch:
    """The batch with other log-probs: exponentials differ in the last digit, so at the edge of a clip range a token may
    fall to either side, of 16 million about one."""
    logprobs = (batch.logprobs.detach() + by).requires_grad_()
    return TokenBatch(logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask, batch.cu_seqlens)


def compiled(name: str, statistics: Any) -> Callable[[TokenBatch], torch.Tensor]:
    objective = OBJECTIVES[name]()

    @torch.compile(dynamic=False)
    def forward(*tensors: torch.Tensor) -> Any:
        terms = objective(TokenBatch(*tensors), statistics)
        return terms.loss, terms.kept, list(terms.metrics.values()), list(terms.histograms.values())

    def run(batch: TokenBatch) -> torch.Tensor:
        inputs = (batch.logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask, batch.cu_seqlens)
        return torch.autograd.grad(forward(*inputs)[0].sum(), batch.logprobs)[0]

    return run


def loss_alone(name: str) -> Callable[[TokenBatch], torch.Tensor] | None:
    if name not in ("mu_grpo", "prefix_ratio_grpo", "grpo"):
        return None

    def run(batch: TokenBatch) -> torch.Tensor:
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        ratio = (l + prefix_min_log_ratio(l, batch) if name == "prefix_ratio_grpo" else l).exp()
        low, high = (0.0, 5.0) if name == "mu_grpo" else (0.8, 1.2)
        value = torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)
        if name == "mu_grpo":
            fires = batch.loss_mask & (batch.advantages < 0) & (ratio.detach() < 1e-4)
            vetoed = sequence_sum(fires, batch.cu_seqlens, None)[batch.sequence_ids] > 0
            value = torch.where(vetoed & (batch.advantages < 0), 0, value)
        loss = torch.where(batch.loss_mask, -value, 0)
        return torch.autograd.grad(loss.sum(), batch.logprobs)[0]

    return run


def take_turns(ways: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds of each way: on a GPU those of `gpu_milliseconds`, on a CPU the least CPU time after one call."""
    if device.type == "cuda":
        return {name: common.gpu_milliseconds(way, repeats) / 1e3 for name, way in ways.items()}
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if turn:
                best[name] = min(best[name], time.process_time() - start)
    return best


def measure(
    name: str, tokens: int, device: torch.device, backends: list[str], repeats: int, compile: bool = True
) -> dict[str, Any]:
    batch = make_batch(tokens, device)
    statistics = OBJECTIVES[name]().statistics(batch.detach())
    functions = {backend: everything(name, backend, statistics) for backend in ("torch", *backends)}
    if compile:
        functions["compile"] = compiled(name, statistics)
    if (alone := loss_alone(name)) is not None:
        functions["loss alone"] = alone
    beside = [functions["torch"](shifted(batch, by)) for by in (0.0, -EDGE, EDGE)]

    def check(function: Callable[[TokenBatch], torch.Tensor]) -> None:  # a fast but wrong function is not measured
        found = function(batch)
        wrong = ~torch.stack([torch.isclose(found, right, rtol=1e-4, atol=1e-5) for right in beside]).any(0)
        assert not wrong.any(), f"{wrong.sum()} of {tokens} gradients differ"

    right, failures = common.attempt({way: partial(check, function) for way, function in functions.items()})
    copy = torch.empty(tokens, device=device)
    ways: dict[str, Callable[[], Any]] = {way: partial(functions[way], batch) for way in right}
    ways["copy"] = lambda: copy.copy_(batch.rollout_logprobs)
    seconds = take_turns(ways, repeats, device)
    row: dict[str, Any] = {"objective": name, "tokens": tokens, "device": device.type}
    row |= {f"{way} ms": 1e3 * seconds[way] if way in right else "failed" for way in functions}
    row["failed"] = "; ".join(failures.values())
    for backend in right.keys() & set(backends):
        others = {"torch": "eager", "compile": "compile", "loss alone": "loss alone"}
        row |= {f"{name}/{backend}": seconds[way] / seconds[backend] for way, name in others.items() if way in seconds}
        bandwidth = BYTES * tokens / seconds[backend] / (8 * tokens / seconds["copy"])
        row[f"{backend} share of copy bandwidth"] = bandwidth
        if device.type == "cuda":
            row[f"{backend} launches"], row[f"{backend} host syncs"] = common.launches_and_syncs(ways[backend])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 20, 1 << 24])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--objectives", nargs="+", default=list(CASES), choices=list(OBJECTIVES))
    arguments = common.parse_with_threads(parser)
    cpu = torch.device("cpu")
    sizes, objectives = arguments.tokens, arguments.objectives
    rows = [measure(name, size, cpu, ["cpp"], arguments.repeats) for size in sizes for name in objectives]
    common.write_table("token_pass_cpu", rows)


if __name__ == "__main__":
    main()
