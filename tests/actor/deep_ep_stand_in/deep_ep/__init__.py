"""A stand-in for DeepEP 1.2.1 on CPUs: what Megatron-Core's flex dispatcher calls, with the preconditions it asserts.

Shapes and the order of rows are those of ``deep_ep/buffer.py``, assertions those of ``csrc/deep_ep.cpp``
and ``csrc/kernels/intranode.cu``. As with ``async_finish`` there, what is received is there only after the event that
comes with it was waited for; until then it is NaN.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from deep_ep.utils import EventOverlap

MOST_CHOSEN = 32  # experts per token


class Buffer:
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0

    @staticmethod
    def get_dispatch_config(num_ranks):
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts, **_):
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and not num_experts % self.group.size()
        chosen = torch.zeros(len(topk_idx), num_experts, dtype=torch.bool).scatter(1, topk_idx, True)
        in_rank = chosen.unflatten(1, (self.group.size(), -1)).any(2)
        return in_rank.sum(0).int(), None, chosen.sum(0).int(), in_rank, EventOverlap()

    def dispatch(
        self, x, handle=None, is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, **_
    ):
        """Every rank gets each token that chose one of its experts once, ordered by rank of origin and token.

        The handle is ``is_token_in_rank`` of all ranks.
        """
        _check(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            event = EventOverlap()
            return event.later(self._exchange(x, handle)), None, None, None, None, event
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        assert topk_idx.shape[1] <= MOST_CHOSEN
        handle = self._gather(is_token_in_rank)
        local = len(num_tokens_per_expert) // self.group.size()
        experts = self._exchange(topk_idx, handle) - self.group.rank() * local
        mine = (experts >= 0) & (experts < local)
        weights = torch.where(mine, self._exchange(topk_weights, handle), 0.0)
        experts = torch.where(mine, experts, -1)
        counts = [int((experts == expert).sum()) for expert in range(local)]
        event = EventOverlap()
        return event.later(self._exchange(x, handle)), experts, event.later(weights), counts, handle, event

    def combine(self, x, handle, topk_weights=None, **_):
        """The sum over ranks of a token's rows, and of their weights, in float32."""
        _check(x)
        assert topk_weights is None or topk_weights.dtype == torch.float32
        event = EventOverlap()
        weights = None if topk_weights is None else event.later(self._sum(topk_weights, handle))
        return event.later(self._sum(x, handle)), weights, event

    def _exchange(self, rows, handle):
        everyone = zip(self._gather(rows), handle, strict=True)
        return torch.cat([sent[in_rank[:, self.group.rank()]] for sent, in_rank in everyone])

    def _sum(self, rows, handle):
        me = self.group.rank()
        total = torch.zeros(len(handle[me]), rows.shape[1])
        for rank, theirs in enumerate(self._gather(rows)):
            begin = sum(int(in_rank[:, rank].sum()) for in_rank in handle[:me])
            mine = handle[me][:, rank]
            total[mine] += theirs[begin : begin + int(mine.sum())].float()
        return total.to(rows.dtype)

    def _gather(self, rows):
        everyone = [None] * self.group.size()
        dist.all_gather_object(everyone, rows, group=self.group)
        return everyone


def _check(rows):
    assert rows.ndim == 2 and rows.is_contiguous()
    assert rows.shape[1] * rows.element_size() % 16 == 0, "rows are copied 16 bytes at a time"
