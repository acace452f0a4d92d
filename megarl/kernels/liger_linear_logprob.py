"""`linear_logprob` by Liger's fused linear cross entropy, only where it computes the same.

That is float32 on one rank. For bfloat16 inputs Liger 0.8 rounds logits (to bfloat16; on Hopper to float16), returns a
bfloat16 entropy, and adds the gradient of weight in bfloat16. Its tensor-parallel function returns the gradient of
hidden already summed over the group, which here is the caller's part.
"""

from __future__ import annotations

import torch
from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction
from torch.distributed import ProcessGroup

from megarl.errors import UserError


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,  # without padding rows
    targets: torch.Tensor,
    temperature: float,
    group: ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `megarl.kernels.linear_logprob`, but for a target outside the vocabulary the log-probability is that of 0."""
    if hidden.dtype is not torch.float32:
        raise UserError(f'kernel backend "liger" got {hidden.dtype}, which Liger rounds; use "triton" or "torch"')
    if group is not None and group.size() > 1:
        raise UserError('kernel backend "liger" takes the whole vocabulary on one rank; use "triton" or "torch"')
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) == (9, 0):
        raise UserError('kernel backend "liger" takes bfloat16 alone on Hopper, and rounds it; use "triton" or "torch"')
    if not hidden.shape[0]:  # an error to Liger
        nothing = (hidden @ weight[:1].t())[:, 0]
        return nothing, nothing.clone()
    inside = (targets >= 0) & (targets < weight.shape[0])
    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden, weight, torch.where(inside, targets, 0), float(temperature), -100, 1, True
    )
    return -nll, entropy
