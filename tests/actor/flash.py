"""The two operators of flash attention in plain float32, for devices on which this build of torch lacks them."""

import contextlib

import torch


def _sequences(query, key, value, cu_q, cu_k, scale, left):
    """Yield for each sequence: slices of its queries and keys, its q, k and v in float32, and its scores.

    k and v are repeated for every query head. The causal mask, and the window of ``left`` keys before a query's own
    (-1: all), are aligned to the lower right corner.
    """
    query, key, value = (x.float().transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    for a, b, c, d in zip(*(x for cu in (cu_q, cu_k) for x in (cu.tolist()[:-1], cu.tolist()[1:])), strict=True):
        q, k, v = query[:, a:b], key[:, c:d], value[:, c:d]
        hidden = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - b + a).logical_not()
        if left >= 0:
            hidden |= torch.ones_like(hidden).tril(d - c - b + a - left - 1)
        yield slice(a, b), slice(c, d), q, k, v, (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)


def _forward(
    query, key, value, cu_q, cu_k, max_q, max_k, dropout, is_causal, return_debug_mask, *, scale=None,
    window_size_left=-1, window_size_right=-1, **_,
):  # fmt: skip
    assert window_size_right == 0 and is_causal == (window_size_left == -1)
    assert dropout == 0 and query.dtype in (torch.bfloat16, torch.float16)
    assert all(cu.dtype == torch.int32 for cu in (cu_q, cu_k))
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for mine, _, _, _, v, scores in _sequences(query, key, value, cu_q, cu_k, scale, window_size_left):
        out[mine] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        lse[:, mine] = scores.logsumexp(-1)
    return out, lse, *(query.new_empty(0) for _ in range(3))


def _backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng, unused, *, scale=None,
    window_size_left=-1, **_,
):  # fmt: skip
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for mine, keys, q, k, v, scores in _sequences(query, key, value, cu_q, cu_k, scale, window_size_left):
        g, o = (x[mine].float().transpose(0, 1) for x in (grad, out))
        weights = (scores - lse[:, mine, None]).exp()
        d_scores = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        dq[mine] = (d_scores @ k).transpose(0, 1)
        for target, part in ((dk, d_scores.transpose(1, 2) @ q), (dv, weights.transpose(1, 2) @ g)):
            target[keys] = part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


@contextlib.contextmanager
def flash_attention_on(device):
    """Register both operators for ``device``, a dispatch key of torch such as "CPU"."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _forward, device)
        library.impl("_flash_attention_backward", _backward, device)
        yield
