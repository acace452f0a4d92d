"""megarl's objectives in TRL: use `MegarlTrainer` as ``trl.GRPOTrainer``. For TRL 1.16.0, whose `_compute_loss` is
private; text models, no KL term, no entropy bonus, no balancing loss of a router.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer

from megarl.objectives import build_objective, padded_terms


class MegarlTrainer(GRPOTrainer):
    objective = build_objective("mu_grpo", {"veto_threshold": 1e-4})

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        logprobs, _, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion_ids.size(1),
        )
        old = inputs.get("old_per_token_logps", logprobs.detach())  # TRL leaves it out where the two are the same
        rollout = inputs.get("sampling_per_token_logps", old)  # what vLLM said, where it generated
        terms = padded_terms(self.objective, logprobs, rollout, inputs["advantages"], mask, old_logprobs=old)
        # the tokens of all ranks in everything that was generated at once, of which a step trains a part
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return terms.loss.sum() / tokens
