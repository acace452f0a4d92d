"""Flash attention of responses that share the keys of their prompt, against whole sequences."""

from __future__ import annotations

import numpy as np
import torch

STEM, RESPONSES, HEADS, KV_HEADS, WIDTH = 24, (3, 5, 9), 4, 2, 16


def whole_and_shared() -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    """Output and gradients for the rows of the shared layout, by whole sequences and by gathered keys; bytes that the
    second keeps for its backward pass, and those of its inputs, its output and its log-sum-exp."""
    from megarl.actor.flash import Rows, flash_attention

    torch.manual_seed(0)
    total = STEM + sum(RESPONSES)
    ends = np.cumsum([STEM, *RESPONSES])
    own = [np.arange(end - size, end) for end, size in zip(ends, (STEM, *RESPONSES), strict=True)]
    whole = [own[0], *(np.concatenate([own[0], x]) for x in own[1:])]
    places = np.concatenate(whole)
    lengths = [[len(x) for x in own], [len(x) for x in whole]]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32).cuda() for sizes in lengths)
    shapes = ((total, HEADS, WIDTH), (total, KV_HEADS, WIDTH), (total, KV_HEADS, WIDTH))
    inputs = [torch.randn(shape).bfloat16().cuda().requires_grad_() for shape in shapes]
    gradient = torch.randn(shapes[0]).bfloat16().cuda()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        longest = max(lengths[0]) if rows else max(lengths[1])
        return flash_attention(q, k, v, (cu, cu_k, longest, max(lengths[1])), (-1, 0), 0.25, rows)

    # whole sequences: every response with queries of its stem, whose outputs nobody reads
    index = torch.from_numpy(places).cuda()
    last = torch.from_numpy(np.cumsum(lengths[1]) - 1).cuda()
    rows_of = torch.cat(
        [torch.arange(int(end) + 1 - n, int(end) + 1).cuda() for end, n in zip(last, lengths[0], strict=True)]
    )
    out = call(*(x.float().index_select(0, index).bfloat16() for x in inputs), cu_k, None).index_select(0, rows_of)
    right = [out, *torch.autograd.grad(out, inputs, gradient)]
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x.nbytes) and x, lambda x: x):
        out = call(*inputs, cu_q, Rows.of(places, total, inputs[0].device))
    needed = sum(x.nbytes for x in (*inputs, out, cu_q, cu_k)) + 4 * HEADS * total
    return right, [out, *torch.autograd.grad(out, inputs, gradient)], sum(kept.values()), needed


def test_keys_of_a_prompt_are_gathered_and_not_kept():
    right, ours, kept, needed = whole_and_shared()
    for a, b in zip(ours, right, strict=True):
        assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()
    assert kept == needed
