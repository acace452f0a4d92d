"""The token pass in C++ (CPU) and CUDA: `csrc/cpu/token_pass.cpp`, `csrc/cuda/token_pass.cu`."""

from __future__ import annotations

import torch

from megarl.kernels import library
from megarl.kernels.token_pass.outputs import SUMS, empty_outputs, fake_outputs, save_coefficient, scale_coefficient
from megarl.kernels.tokens import Tokens


@torch.library.custom_op("megarl::token_pass", mutates_args=(), device_types=("cpu", "cuda"))
def token_pass_compiled(
    rule: str,
    parameters: torch.Tensor,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_min: torch.Tensor | None,
    log_ratio: torch.Tensor | None,
    first_trigger: torch.Tensor | None,
    places: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `megarl.kernels.token_pass.token_pass`, whose arguments these are; on the device of the tensors."""
    tokens = Tokens(logprobs, rollout_logprobs, advantages, mask, cu_seqlens, old_logprobs)
    device = logprobs.device
    if device.type == "cpu" and int(cu_seqlens[-1]) != logprobs.numel():
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {logprobs.numel()} tokens")
    outputs = empty_outputs(logprobs, mask, cu_seqlens)
    inherited = None
    if prefix_min is not None:
        inherited = library.InheritedPointers(*(t.data_ptr() for t in (prefix_min, log_ratio, first_trigger)))  # type: ignore[union-attr]
    scratch = (logprobs.new_empty(tokens.segments, len(SUMS), dtype=torch.float64),) if device.type == "cuda" else ()
    library.call("token_pass", device, rule, parameters, tokens.pointers(), inherited, places, *outputs, *scratch)
    return outputs  # type: ignore[return-value]


token_pass_compiled.register_fake(fake_outputs)
token_pass_compiled.register_autograd(scale_coefficient, setup_context=save_coefficient)
