"""megarl's objectives in verl, written against verl-project/verl 1dda039b9 (2026-08-22), trainer `trainer.use_v1`.

``actor_rollout_ref.model.external_lib=verl_loss`` imports this module, which must be in ``PYTHONPATH``, in all workers.
``actor_rollout_ref.actor.policy_loss.loss_mode=megarl`` selects it, and with
``algorithm.rollout_correction.bypass_mode=true`` ``old_log_prob`` is what the rollout engine said.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from megarl.objectives import build_objective, padded_terms, summarise

OBJECTIVE = build_objective("mu_grpo", {"veto_threshold": 1e-4})


@register_policy_loss("megarl")
def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """All [B, R]. The loss of the micro-batch, divided by the global count that verl gives."""
    if rollout_is_weights is not None:
        raise ValueError("megarl's objectives hold the importance weights themselves: set rollout_is = null")
    terms = padded_terms(OBJECTIVE, log_prob, old_log_prob, advantages, response_mask)
    loss = agg_loss(
        loss_mat=terms.loss, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    numbers = summarise(terms.metrics, terms.histograms)
    return loss, {f"actor/{name}": value for name, value in numbers.items() if isinstance(value, float)}
