"""Group-relative advantages from rewards: [N prompts, G responses] in, the same shape out; computed in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megarl.errors import UserError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("group_mean_std", "group_mean", "leave_one_out", "batch_normalised")
STD_FLOOR = 1e-6  # added to the standard deviation, as GRPO's released code does


def group_advantages(rewards: torch.Tensor | np.ndarray, kind: str = "group_mean_std") -> torch.Tensor:
    """[N, G] rewards -> [N, G] float32 advantages, one for each response. kind (recipe key ``objective.advantage``):

    group_mean_std    (r - mean) / (std + 1e-6) within the group; std unbiased (G - 1), as torch.std in GRPO's code
    group_mean        r - mean within the group (Dr. GRPO, arXiv:2503.20783)
    leave_one_out     r - mean of the other G - 1 responses (RLOO, arXiv:2402.14740)
    batch_normalised  (r - mean) / (std + 1e-6) over all N * G responses (REINFORCE++, arXiv:2501.03262)

    Pass the whole optimizer batch, because batch_normalised depends on all of it. With the other kinds, groups whose
    rewards are all equal get exactly 0. Raises `UserError` for an unknown kind, non-finite rewards or G = 1.
    """
    if kind not in KINDS:
        raise UserError(f"objective.advantage is {kind!r}; expected one of {', '.join(KINDS)}")
    r = _rewards(rewards)
    if kind == "batch_normalised":
        if r.numel() < 2:
            raise UserError(f"objective.advantage = {kind!r} needs at least 2 responses in the batch, got {r.numel()}")
        return ((r - r.mean()) / (r.std() + STD_FLOOR)).float()
    if r.shape[1] < 2:
        raise UserError(
            f"objective.advantage = {kind!r} compares the responses of a prompt: "
            "rollout.responses_per_prompt must be at least 2"
        )
    centred = r - r.mean(1, keepdim=True)
    if kind == "group_mean_std":
        centred = centred / (r.std(1, keepdim=True) + STD_FLOOR)
    elif kind == "leave_one_out":
        centred = centred * (r.shape[1] / (r.shape[1] - 1))  # r - (sum - r) / (G - 1)
    return torch.where(zero_variance(r)[:, None], 0, centred).float()


def zero_variance(rewards: torch.Tensor | np.ndarray) -> torch.Tensor:
    """[N, G] -> [N] bool, True for groups whose responses all have the same reward: no group-relative signal.

    ``objective.zero_variance = "keep"`` counts their tokens in the loss's denominator, ``"drop"`` removes the groups
    from the batch.
    """
    r = _rewards(rewards)
    return r.amax(1) == r.amin(1)


def _rewards(rewards: torch.Tensor | np.ndarray) -> torch.Tensor:
    r = torch.as_tensor(rewards).detach().double()
    if r.dim() != 2 or r.numel() == 0:
        raise UserError(f"rewards have shape {tuple(r.shape)}; expected [prompts, responses]")
    bad = (~torch.isfinite(r)).nonzero()
    if bad.numel():
        n, g = bad[0].tolist()
        raise UserError(f"rewards[{n}, {g}] is {float(r[n, g])}; every response needs a finite reward")
    return r
