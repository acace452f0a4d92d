"""The token pass in C++ (CPU) and CUDA: `csrc/cpu/token_pass.cpp`, `csrc/cuda/token_pass.cu`."""

from __future__ import annotations

import torch

from megarl.kernels import library
from megarl.kernels.token_pass.outputs import SUMS, Arguments, empty_outputs, operator


@operator("token_pass")
def token_pass_compiled(a: Arguments) -> tuple[torch.Tensor, ...]:
    """The operation for the device of the tensors, a CPU or a CUDA GPU."""
    tokens, device = a.tokens, a.logprobs.device
    if device.type == "cpu" and int(a.cu_seqlens[-1]) != a.logprobs.numel():
        raise ValueError(f"cu_seqlens ends at {int(a.cu_seqlens[-1])}, but there are {a.logprobs.numel()} tokens")
    outputs = empty_outputs(a)
    scratch = (a.logprobs.new_empty(tokens.segments, len(SUMS), dtype=torch.float64),) if device.type == "cuda" else ()
    library.call(
        "token_pass",
        device,
        a.rule,
        a.parameters,
        a.dampened,
        tokens.pointers(),
        a.prefix_min,
        a.given_value,
        a.given_index,
        *outputs,
        *scratch,
    )
    return outputs
