"""lm head -> token log-probability and entropy without materialising the logits: chunked, vocabulary-parallel, exact.

With z = hidden weight^T / T, p = softmax(z) and H the entropy, the gradients are

    d log p_y / d z_j = 1[j = y] - p_j            d H / d z_j = -p_j (log p_j + H)

so log-sum-exp and entropy, two numbers a token, are all the backward pass needs beside its inputs; it recomputes the
logits of one chunk of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

CHUNK_BYTES = 64 * 2**20  # of float32 logits; at most two buffers of this size are alive
_HALF = (torch.bfloat16, torch.float16)


def linear_logprob(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V_local, H], this rank's contiguous rows of the vocabulary
    targets: torch.Tensor,  # [N] int64, indices of the whole vocabulary, the same on every rank of `group`
    temperature: float = 1.0,
    group: ProcessGroup | None = None,  # the ranks that share the vocabulary, in its order; None: weight is whole
    chunk_tokens: int | None = None,  # None: as many as CHUNK_BYTES of logits hold
    vocab_size: int | None = None,  # true size of the whole vocabulary; rows beyond it are padding and get no gradient
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy in nats, both [N] float32 (or float64).

    Both outputs carry exact gradients to hidden and weight. Logits are never rounded below float32. Under `group` the
    gradient of hidden is this rank's part: the caller sums it over the group. A target outside the vocabulary is an
    indexing error without a group, and NaN under a group.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), group.size())
    rows = weight.shape[0]
    total = rows * ranks if vocab_size is None else vocab_size
    if not 0 < total <= rows * ranks:
        raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {rows * ranks}, the rows of weight on all ranks")
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * rows))
    shard = (rank * rows, max(0, min(rows, total - rank * rows)), total)
    outputs: tuple[torch.Tensor, torch.Tensor] = _LinearLogprob.apply(
        hidden, weight, targets, temperature, group, chunk_tokens, shard
    )
    return outputs


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: ProcessGroup | None,
        chunk_tokens: int,
        shard: tuple[int, int, int],  # first row, rows that are not padding, size of the whole vocabulary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, rows, total = shard
        local, inside = targets, None
        if group is not None:
            inside = (targets >= first) & (targets < first + rows)
            local = torch.where(inside, targets - first, 0)
        h, w = _operands(hidden, weight[:rows])
        parts = [_statistics(h[chunk], w, local[chunk], temperature) for chunk in _chunks(h.shape[0], chunk_tokens)]
        lse, logprobs, entropy = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if inside is not None:
            lse, logprobs, entropy = _combine(lse, torch.where(inside, logprobs + lse, 0), entropy, group)
            logprobs = logprobs.masked_fill((targets < 0) | (targets >= total), torch.nan)
        ctx.save_for_backward(hidden, weight, local, inside, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_tokens, ctx.rows = temperature, chunk_tokens, rows
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, local, inside, lse, entropy = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        h, w = _operands(hidden, weight[: ctx.rows])
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs / ctx.temperature
        at_target = grad_logprobs if inside is None else grad_logprobs * inside
        grad_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        grad_h: list[torch.Tensor] = []
        grad_w: torch.Tensor | None = None
        for chunk in _chunks(h.shape[0], ctx.chunk_tokens):
            dz = _logits(h[chunk], w, ctx.temperature).sub_(lse[chunk, None])  # log p
            if grad_entropy is None:
                dz.exp_().mul_(-grad_logprobs[chunk, None])
            else:
                p = dz.exp()
                dz.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(grad_logprobs[chunk, None])
                dz.mul_(p).neg_()
            if ctx.rows:
                dz.scatter_add_(1, local[chunk, None], at_target[chunk, None])
            dz = dz.to(h.dtype)
            if need_hidden:
                grad_h.append(_matmul(dz, w).to(hidden.dtype))
            if need_weight:
                part = _matmul(dz.t(), h[chunk])
                grad_w = part if grad_w is None else grad_w.add_(part)
        whole_h = (grad_h[0] if len(grad_h) == 1 else torch.cat(grad_h)) if need_hidden else None
        return whole_h, None if grad_w is None else _with_padding(grad_w, weight), None, None, None, None, None


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, max(tokens, 1), chunk_tokens):  # one empty chunk for no tokens
        yield slice(start, start + chunk_tokens)


def _operands(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As they are on a GPU, whose matrix units add half-precision products in float32; float32 copies on a CPU."""
    if hidden.is_cuda or hidden.dtype not in _HALF:
        return hidden, weight
    return hidden.float(), weight.float()


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b, half-precision inputs to a float32 result that was never rounded to half precision."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype in _HALF else torch.mm(a, b)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = _matmul(hidden, weight.t())  # [n, rows]
    return logits if temperature == 1 else logits.div_(temperature)


def _statistics(
    hidden: torch.Tensor, weight: torch.Tensor, local: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log-sum-exp, log-probability of the target and entropy of softmax over this rank's rows alone, each [n]."""
    logits = _logits(hidden, weight, temperature)
    if not weight.shape[0]:  # the shard is all padding: no probability mass; finite, so that 0 * lse is 0
        nothing = logits.new_zeros(logits.shape[0])
        return torch.full_like(nothing, torch.finfo(logits.dtype).min), nothing, nothing
    lse = logits.logsumexp(1)
    logp = logits.sub_(lse[:, None])
    return lse, logp.gather(1, local[:, None]).squeeze(1), -logp.exp().mul_(logp).sum(1)


def _combine(
    lse: torch.Tensor, target: torch.Tensor, entropy: torch.Tensor, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of the whole vocabulary from those of each shard: one MAX and one SUM all-reduce.

    target: the target's logit on the rank that has it, else 0. With w_r = exp(lse_r - M) and S = sum_r w_r, the
    expected logit minus M is sum_r w_r (lse_r - H_r - M) / S, and the entropy is log S minus that.
    """
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    share = (lse - top).exp()
    sums = torch.stack([share, share * (lse - entropy - top), target])
    dist.all_reduce(sums, group=group)
    mass, expected, target = sums
    log_mass = mass.log()
    return top + log_mass, target - top - log_mass, log_mass - expected / mass


def _with_padding(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if grad.shape == weight.shape:
        return grad.to(weight.dtype)
    whole = torch.zeros_like(weight)
    whole[: grad.shape[0]] = grad
    return whole
