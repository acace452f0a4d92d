"""The weight-drift check: an engine has the right weights if it scores fixed sequences as the actor does.

A wrong weight sync raises no error anywhere; rewards collapse some updates later. So this check follows every load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megarl.errors import UserError
from megarl.rollout.engine import RolloutEngine
from megarl.storage.reference_logprobs import Reference, reference_sequences

# nats: (largest at a token, mean over all). Two float32 implementations differ by about 1e-5. In bfloat16 a token whose
# experts are nearly tied may be routed to others, so the mean decides; a wrong weight does far more than that.
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (3.0, 0.1)}


@dataclass(frozen=True)
class Drift:
    """Distance of an engine's log-probs from the reference, in nats."""

    max: float  # of a token
    mean: float  # over all tokens
    tokens: int
    precision: str


def check_weights(engine: RolloutEngine, reference: Reference) -> Drift:
    """Compare ``engine`` with the reference; `UserError` if it is beyond the tolerance of the coarser precision."""
    scored = engine.score(reference.sequences)
    difference = np.abs(np.concatenate(scored).astype(np.float64) - np.concatenate(reference.logprobs))
    precision = max(engine.precision, reference.precision, key=lambda name: TOLERANCES[name])
    drift = Drift(float(difference.max()), float(difference.mean()), len(difference), precision)
    largest, mean = TOLERANCES[precision]
    if not (drift.max <= largest and drift.mean <= mean):  # NaN fails
        raise UserError(
            f"the engine's weights are not the policy's: its log-probs of {drift.tokens} fixed tokens are "
            f"{drift.mean:.3g} nats off in the mean and up to {drift.max:.3g} at a token; {precision} allows "
            f"{mean:g} and {largest:g}. Nothing was generated with them"
        )
    return drift


@torch.inference_mode()
def hugging_face_reference(policy_dir: Path) -> Reference:
    """The reference of a base model, which no actor has exported: transformers' log-probs, on the CPU.

    In the precision of the file.
    """
    from transformers import AutoModelForCausalLM  # takes seconds

    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype="auto", local_files_only=True, use_safetensors=True)
    model.eval()
    sequences = reference_sequences(model.config.vocab_size, model.config.max_position_embeddings)
    return Reference(
        sequences=sequences,
        logprobs=[score(model, tokens) for tokens in sequences],
        precision="float32" if model.dtype == torch.float32 else "bfloat16",
    )


def score(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Log-probs at temperature 1 of all but the first token, [n - 1] float32."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    scored: np.ndarray = logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return scored
