"""Log-probability and entropy of tokens from the hidden states and the weight of the LM head, without materialised
logits; the vocabulary may be divided over ranks.

With z = hidden weight^T / T, p = softmax(z) and H the entropy, the gradients are

    d log p_y / d z_j = 1[j = y] - p_j            d H / d z_j = -p_j (log p_j + H)

so besides its inputs the backward pass needs only two numbers per token, log-sum-exp and entropy. It recomputes the
logits of one chunk of tokens at a time, and adds up the chunks' gradients of weight in float32.

Backends work in base 2, since hardware computes 2^x; the scale of the logits, log2(e) / T, is the alpha of the matrix
product. They return four float32 (or float64) numbers per token: the largest scaled logit m, the sums of 2^(z - m) and
of 2^(z - m) (z - m), and the scaled logit of the target.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megarl.errors import UserError
from megarl.kernels.linear_logprob import torch_backend
from megarl.kernels.tokens import check_backend
from megarl.kernels.weight_gradient import add_product, added, main_grad

BACKENDS = ("torch", "triton")


def linear_logprob(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V_local, H], this rank's contiguous rows of the vocabulary
    targets: torch.Tensor,  # [N] int64, token ids in the whole vocabulary, the same on every rank of `group`
    temperature: float = 1.0,
    group: ProcessGroup | None = None,  # ranks that share the vocabulary, in its order; None: weight is whole
    chunk_tokens: int | None = None,  # number of tokens whose logits exist at a time; None: chosen for the device
    vocab_size: int | None = None,  # size of the whole vocabulary; further rows are padding and get no gradient
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy in nats, both [N] float32 (or float64).

    Both outputs carry exact gradients to hidden and weight. Logits are never rounded below float32. Under `group` the
    gradient of hidden is this rank's part: the caller sums it over the group. The log-probability of a target outside
    the vocabulary is NaN, without gradient.

    backend: ``torch`` (any device); ``triton`` (a GPU), which keeps the logits in registers and writes only their
    gradient, in bfloat16 for bfloat16 inputs. `UserError` with the remedy if a backend is missing or does not take
    these inputs. `megarl.kernels.linear_logprob.definition` is the readable definition.
    """
    if backend not in BACKENDS:
        raise UserError(f"kernel backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if hidden.dtype is not weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; expected one dtype")
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), group.size())
    rows = weight.shape[0]
    total = rows * ranks if vocab_size is None else vocab_size
    if not 0 < total <= rows * ranks:
        raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {rows * ranks}, the rows of weight on all ranks")
    first = rank * rows
    shard_rows = max(0, min(rows, total - first))  # rows of this rank that are not padding
    kernels: ModuleType = torch_backend
    if backend == "triton":
        check_backend(backend, hidden.device)
        kernels = importlib.import_module("megarl.kernels.linear_logprob.triton_backend")
    inside = (targets >= first) & (targets < first + shard_rows)
    local = torch.where(inside, targets - first, -1)
    if chunk_tokens is None:
        chunk_tokens = kernels.chunk_tokens(hidden, shard_rows)
    outputs = _LinearLogprob.apply(hidden, weight, local, temperature, group, chunk_tokens, shard_rows, kernels)
    logprobs, entropy = outputs
    return logprobs.masked_fill((targets < 0) | (targets >= total), torch.nan), entropy


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        local: torch.Tensor,  # [N] row of the target in weight, -1 where another rank has it
        temperature: float,
        group: ProcessGroup | None,
        chunk_tokens: int,
        rows: int,  # rows of weight that are not padding
        kernels: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = math.log2(math.e) / temperature
        statistics = hidden.new_zeros(4, hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        if rows:
            kernels.statistics(*kernels.operands(hidden, weight[:rows]), local, scale, chunk_tokens, statistics)
        else:  # the shard is all padding: no probability mass, and a finite top, so that 0 * top is 0
            statistics[0] = torch.finfo(statistics.dtype).min
        top, mass, expected, target = statistics if group is None else _combine(statistics, group)
        log_mass = mass.log2()
        lse = top + log_mass
        logprobs = (target - lse) * math.log(2)
        entropy = (log_mass - expected / mass) * math.log(2)
        ctx.save_for_backward(hidden, weight, local, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_tokens, ctx.rows, ctx.kernels = temperature, chunk_tokens, rows, kernels
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, local, lse, entropy = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        coefficients = _coefficients(local, lse, entropy, grad_logprobs, grad_entropy, ctx.temperature)
        grad_h = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None
        grad_w: torch.Tensor | None = None
        total: torch.Tensor | None = None
        if hidden.shape[0] and ctx.rows:
            kernels, scale = ctx.kernels, math.log2(math.e) / ctx.temperature
            h, w = kernels.operands(hidden, weight[: ctx.rows])
            buffer = kernels.gradient_buffer(hidden, ctx.rows, ctx.chunk_tokens)
            with_entropy = grad_entropy is not None
            if need_weight and w.shape[1] == weight.shape[1]:  # no columns that a backend appended
                total = main_grad(weight)
            grad_w = None if total is None else total[: ctx.rows]
            for chunk in torch_backend.chunks(hidden.shape[0], ctx.chunk_tokens):
                dz = kernels.logit_gradients(
                    h[chunk], w, local[chunk], coefficients[:, chunk], scale, with_entropy, buffer
                )
                if grad_h is not None:
                    grad_h[chunk] = _product(dz, w)[:, : hidden.shape[1]]
                if need_weight:
                    grad_w = _product(dz.t(), h[chunk], add_to=grad_w)
        if need_weight:
            grad_w = _with_padding(grad_w, weight) if total is None else added(weight)
        return grad_h, grad_w, None, None, None, None, None, None


def _combine(statistics: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Statistics [4, N] of the whole vocabulary from those of each shard: one MAX and one SUM all-reduce."""
    top, mass, expected, target = statistics
    whole = statistics.clone()
    dist.all_reduce(whole[0], dist.ReduceOp.MAX, group)
    below = top - whole[0]
    share = below.exp2()
    whole[1], whole[2], whole[3] = share * mass, share * (expected + mass * below), target
    dist.all_reduce(whole[1:], group=group)
    return whole


def _coefficients(
    local: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """[4, N], the rows lse, a, b, c of d loss / d (hidden weight^T) = 2^l (a + b l) + 1[target] c, with l = z - lse =
    log2 p."""
    of_target = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs / temperature
    of_entropy = torch.zeros_like(lse) if grad_entropy is None else grad_entropy / temperature
    return torch.stack(
        [lse, -(of_target + of_entropy * entropy), -math.log(2) * of_entropy, of_target.masked_fill(local < 0, 0)]
    )


def _product(a: torch.Tensor, b: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """a b in the wider dtype of the two, but at least float32, added to ``add_to`` in place."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(dtype)
    if add_to is not None:
        return add_product(add_to, a, b)
    return torch.mm(a, b) if dtype.itemsize >= 4 else torch.mm(a, b, out_dtype=torch.float32)


def _with_padding(grad: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """The gradient in weight's shape and dtype: zeros for padding rows, without columns that a backend appended."""
    if grad is not None and grad.shape == weight.shape:
        return grad.to(weight.dtype)
    whole = torch.zeros_like(weight)
    if grad is not None:
        whole[: grad.shape[0]] = grad[:, : weight.shape[1]]
    return whole
