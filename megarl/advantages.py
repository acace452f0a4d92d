"""Group-relative advantages from rewards: [N prompts, G responses] in, the same shape out; computed in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from megarl.errors import UserError
from megarl.own_file import describe, file_of, is_own, load
from megarl.recipe.names import ADVANTAGES

if TYPE_CHECKING:
    import numpy as np

TEMPERATURE = 0.5  # of the value in OAPL's advantage; from its authors' A*-PO (arXiv:2505.20686)
STD_FLOOR = 1e-6  # added to the standard deviation, as GRPO's released code does


def group_advantages(rewards: torch.Tensor | np.ndarray, kind: str = "group_mean_std") -> torch.Tensor:
    """[N, G] rewards -> [N, G] float32 advantages, one for each response. kind (recipe key ``objective.advantage``):

    group_mean_std    (r - mean) / (std + 1e-6) within the group; std unbiased (G - 1), as torch.std in GRPO's code
    group_mean        r - mean within the group (Dr. GRPO, arXiv:2503.20783)
    leave_one_out     r - mean of the other G - 1 responses (RLOO, arXiv:2402.14740)
    batch_normalised  (r - mean) / (std + 1e-6) over all N * G responses (REINFORCE++, arXiv:2501.03262)
    optimal           r - V, V = b log mean exp(r / b) over the group, b = .5 (OAPL, arXiv:2602.19362)
    FILE.py:FUNCTION  what the user's own function makes of the rewards, float64 [N, G], as a tensor of the same shape

    Pass the whole optimizer batch, because batch_normalised depends on all of it. With the others of megarl, groups
    whose rewards are all equal get exactly 0. Raises `UserError` for an unknown kind, non-finite rewards or G = 1, and
    for whatever goes wrong in the user's own function.
    """
    r = _rewards(rewards)
    if is_own(kind):
        return _own(kind, r)
    if kind not in ADVANTAGES:
        raise UserError(f"objective.advantage is {kind!r}; expected one of {', '.join(ADVANTAGES)}")
    if kind == "batch_normalised":
        if r.numel() < 2:
            raise UserError(f"objective.advantage = {kind!r} needs at least 2 responses in the batch, got {r.numel()}")
        return ((r - r.mean()) / (r.std() + STD_FLOOR)).float()
    if r.shape[1] < 2:
        raise UserError(
            f"objective.advantage = {kind!r} compares the responses of a prompt: "
            "rollout.responses_per_prompt must be at least 2"
        )
    if kind == "optimal":
        value = TEMPERATURE * (r / TEMPERATURE).logsumexp(1, keepdim=True) - TEMPERATURE * math.log(r.shape[1])
        return torch.where(zero_variance(r)[:, None], 0, r - value).float()
    centred = r - r.mean(1, keepdim=True)
    if kind == "group_mean_std":
        centred = centred / (r.std(1, keepdim=True) + STD_FLOOR)
    elif kind == "leave_one_out":
        centred = centred * (r.shape[1] / (r.shape[1] - 1))  # r - (sum - r) / (G - 1)
    return torch.where(zero_variance(r)[:, None], 0, centred).float()


def _own(path: str, rewards: torch.Tensor) -> torch.Tensor:
    function = load(path, "objective.advantage")
    try:
        found = function(rewards.clone())
        if found is None:
            raise TypeError("it returned None; is a return missing?")
        found = torch.as_tensor(found).float()  # a float64 may be finite and too large for float32
    except Exception as error:
        raise UserError(f"objective.advantage = {path!r}: {describe(error, file_of(path))}") from error
    if found.shape != rewards.shape or not torch.isfinite(found).all():
        what = list(found.shape) if found.shape != rewards.shape else "numbers that are not finite"
        raise UserError(
            f"objective.advantage = {path!r} returned {what} for rewards {list(rewards.shape)}: expected a finite "
            "advantage for each"
        )
    return found


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
