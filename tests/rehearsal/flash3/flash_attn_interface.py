"""Flash attention 3 on the rehearsal device: what torch's `nn/attention/_fa3.py` expects of the package flash-attn-3.

The operators take the arguments of those in flash-attention's hopper/flash_api.cpp, and compute as those of version 2.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.rehearsal import cuda_only
from tests.rehearsal.device import lib


def _forward(q: Any, k: Any, v: Any, *others: Any) -> Any:
    *_, cu_q, cu_k, _, _, _, longest_q, longest_k = others[:11]
    scale, causal, left, right = others[20:24]
    lib.launched("flash_attn_3::fwd")
    host = [lib.host_view(x) for x in (q, k, v, cu_q, cu_k)]
    options = dict(scale=scale, window_size_left=left, window_size_right=right)
    out, lse, *_ = cuda_only._varlen(*host, longest_q, longest_k, 0.0, causal, False, **options)
    return tuple(lib.device_view(x, q.device.index) for x in (out, lse, torch.empty(0), torch.empty(0)))


def _backward(gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, *others: Any):
    cu_q, cu_k, _, _, longest_q, longest_k, scale, causal, left, right = others[:10]
    lib.launched("flash_attn_3::bwd")
    host = [lib.host_view(x) for x in (gradient, q, k, v, out, lse, cu_q, cu_k)]
    options = dict(scale=scale, window_size_left=left, window_size_right=right)
    found = cuda_only._varlen_backward(*host, longest_q, longest_k, 0.0, causal, None, None, **options)
    for target, values in zip((dq, dk, dv), found, strict=True):
        lib.host_view(target).copy_(values)


torch.ops.flash_attn_3 = types.SimpleNamespace(fwd=_forward, bwd=_backward)
# on a GPU these are C++ kernels, which Python may override
for name in cuda_only.KERNELS:
    torch.library._impls.discard(f"aten/{name}/CUDA")
