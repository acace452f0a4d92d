"""The weight-drift check: an engine has the right weights if it makes of text of the run what the actor does.

A wrong weight sync raises no error anywhere; rewards collapse some updates later. So this check follows every load.

In bfloat16 two implementations differ by more than a policy moves in a few updates, so a tolerance alone cannot see
weights that are a little old. With e the engine's log-probs, n the new policy's and p the previous one's, as the actor
computes both, and q what the engine made of the same text when it had the previous policy, sums over the tokens can,
because rounding that does not know of the updates averages out of them:

- |e - p|^2 - |e - n|^2 is negative where the engine is nearer to the previous policy;
- (e - n)(p - n) + (q - p)(p - n) is 0 in the mean where e has the new weights as q had the previous ones, whatever the
  rounding of actor and engine, and |p - n|^2 times the share of the change that is missing where some of e's are old.

Where an engine offers checksums of its weights, they must also be other ones after another policy was loaded: that sees
the old ones however little the policy has moved.

Differences are clipped, for a token whose experts are nearly tied may be routed elsewhere and then differs by nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.errors import UserError
from megarl.rollout.engine import Request, RolloutEngine, Sampling
from megarl.storage.reference_logprobs import Reference

# nats: (largest at a token, mean over all). Two float32 implementations differ by about 1e-5. In bfloat16 a token whose
# experts are nearly tied may be routed to others, so the mean decides; quantised weights differ at every token.
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (math.inf, 0.1), "quantised": (math.inf, 0.5)}
NOISES, LEAST_NOISE = 3.0, 0.02  # allowed in the mean: so many times the distance of q from p, but at least this
SIGNIFICANT, MISSING = 4.0, 0.1  # standard errors, and a share of the change between two policies, that are too much
BLOCK = 16  # tokens whose rounding is counted as one: what it does to a token it carries on to the following ones
TOKENS_AT_ONCE = 512  # that transformers scores, with their padding; the logits of a large vocabulary are .6 MB a token
SAMPLES, SAMPLED_TOKENS = 4, 16  # responses that are sampled, to compare their log-probs with the engine's own scores


@dataclass(frozen=True)
class Drift:
    """Distance of an engine's log-probs from the actor's, in nats, and where between two policies it stands."""

    max: float  # of a token
    mean: float  # over all tokens
    tokens: int
    precision: str
    nearer: float | None = None  # standard errors by which it is nearer to the new policy than to the one before
    missing: float | None = None  # share of the change between the two that it lacks
    missing_errors: float | None = None  # the same in standard errors
    sampled: float = 0.0  # mean distance of the log-probs of sampled tokens from the engine's own scores
    checksum: str | None = None  # of the engine's weights, where it offers one


def check_weights(engine: RolloutEngine, reference: Reference, before: str | None = None) -> Drift:
    """Compare ``engine`` with the actor, and what it samples with what it scores; `UserError` where they differ.

    before: the checksum of its weights when it had another policy, if it had one and offers checksums.
    """
    checksum = engine.checksum()
    if checksum is not None and checksum == before:
        raise UserError(
            "the engine's weights are not the policy's: to the bit they are those that it had before they were "
            "loaded. Nothing was generated with them"
        )
    drift = judge(engine.score(reference.sequences), reference, engine.precision)
    prompts = [sequence[: max(1, len(sequence) // 2)] for sequence in reference.sequences[:SAMPLES]]
    tokens = min([SAMPLED_TOKENS, *(len(s) - len(p) for s, p in zip(reference.sequences, prompts, strict=False))])
    how = Sampling(1.0, tokens, 1, (), seeds=tuple(range(len(prompts))))
    completions = [completion for _, completion in engine.serve(iter([Request(prompts, how)]))]
    whole = [[*prompts[c.prompt], *c.tokens.tolist()] for c in completions]
    own = [score[-len(c.tokens) :] for score, c in zip(engine.score(whole), completions, strict=True)]
    sampled = _distances([c.logprobs for c in completions], own)
    if not _tolerable(sampled, TOLERANCES[engine.precision]):
        raise UserError(
            f"the engine's log-probs of what it samples are not its own: of {len(sampled)} tokens they are "
            f"{sampled.mean():.3g} nats off its scores in the mean and up to {sampled.max():.3g} at a token. Does an "
            "option of [rollout.vllm] or [rollout.sglang], such as speculative decoding, change them?"
        )
    return Drift(**(vars(drift) | {"sampled": float(sampled.mean()), "checksum": checksum}))


def judge(scored: Sequence[np.ndarray], reference: Reference, precision: str) -> Drift:
    """Of an engine of some ``precision`` that scores the reference's sequences so. `UserError` for wrong weights."""
    precision = max(precision, reference.precision, key=lambda name: TOLERANCES[name][1])
    distances = _distances(scored, reference.logprobs)
    place: dict[str, Any] = _place(scored, reference)
    drift = Drift(float(distances.max()), float(distances.mean()), len(distances), precision, **place)
    largest, mean = TOLERANCES[precision]
    if precision != "float32" and (usual := _usual_distance(reference)) is not None:
        mean = min(mean, max(LEAST_NOISE, NOISES * usual))
    if not _tolerable(distances, (largest, mean)):
        raise UserError(
            f"the engine's weights are not the policy's: its log-probs of {drift.tokens} tokens are "
            f"{drift.mean:.3g} nats off in the mean and up to {drift.max:.3g} at a token; {precision} allows "
            f"{mean:.3g} and {largest:g} here. Nothing was generated with them"
        )
    if place and place["nearer"] < -SIGNIFICANT:
        raise UserError(
            f"the engine's weights are not the policy's but those of the policy before: its log-probs of "
            f"{drift.tokens} tokens are nearer to it by {-place['nearer']:.1f} standard errors. Nothing was generated "
            "with them"
        )
    if place.get("missing", 0) > MISSING and place["missing_errors"] > SIGNIFICANT:
        raise UserError(
            f"the engine's weights are not the policy's: some are those of the policy before. Its log-probs of "
            f"{drift.tokens} tokens lack {place['missing']:.0%} of the change ({place['missing_errors']:.1f} standard "
            "errors). Nothing was generated with them"
        )
    return drift


def _usual_distance(reference: Reference) -> float | None:
    """Nats: the mean distance of engine and actor with the previous policy."""
    if reference.previous is None or not reference.stored or not any(map(len, reference.stored)):
        return None
    pairs = [(q, p[-len(q) :]) for q, p in zip(reference.stored, reference.previous, strict=True) if len(q)]
    return float(_distances([q for q, _ in pairs], [p for _, p in pairs]).mean())


def _tolerable(distances: np.ndarray, limits: tuple[float, float]) -> bool:
    return bool(distances.max() <= limits[0] and distances.mean() <= limits[1])  # NaN is not


def _distances(scored: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """[tokens] float64."""
    return np.abs(np.concatenate(scored).astype(np.float64) - np.concatenate(expected))


def _place(scored: Sequence[np.ndarray], reference: Reference) -> dict[str, float]:
    """The fields of `Drift` that compare with the previous policy; none without one, or one that is the same."""
    if reference.previous is None:
        return {}
    all_changes = np.abs(np.concatenate(reference.previous).astype(np.float64) - np.concatenate(reference.logprobs))
    if (most := float(np.median(all_changes))) == 0:
        return {}
    stored = reference.stored or [np.empty(0)] * len(scored)
    nearer: list[float] = []
    missing: list[float] = []
    changed = 0.0
    for e, n, p, q in zip(scored, reference.logprobs, reference.previous, stored, strict=True):
        to_new, to_previous, change = (np.clip(x, -most, most) for x in (e - n, e - p, p - n))
        nearer += _blocks(to_previous**2 - to_new**2)
        if len(q):
            then, change = np.clip(q - p[-len(q) :], -most, most), change[-len(q) :]
            missing += _blocks(change * (to_new[-len(q) :] + then))
            changed += float((change**2).sum())
    place = {"nearer": _in_errors(nearer)}
    return place | {"missing": sum(missing) / changed, "missing_errors": _in_errors(missing)} if changed else place


def _blocks(values: np.ndarray) -> list[float]:
    """Sums over `BLOCK` tokens."""
    sums: list[float] = np.add.reduceat(values.astype(np.float64), np.arange(0, len(values), BLOCK)).tolist()
    return sums


def _in_errors(parts: list[float]) -> float:
    """A sum of independent parts over its standard error, which is estimated from the parts; 0 if all are 0."""
    error = float(np.sqrt(np.square(parts).sum()))
    return sum(parts) / error if error else 0.0


def hugging_face_reference(policy_dir: Path, sequences: list[list[int]], temperature: float = 1.0) -> Reference:
    """What transformers makes, on the CPU, of a base model, which no actor has exported.

    In the precision of the file.
    """
    model = load_model(policy_dir)
    return Reference(
        sequences=sequences,
        logprobs=score(model, sequences, temperature),
        precision="float32" if model.dtype == torch.float32 else "bfloat16",
    )


def load_model(policy_dir: Path) -> Any:
    """transformers' model of a policy, on the CPU, in the precision of the file."""
    from transformers import AutoModelForCausalLM  # takes seconds
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype="auto", local_files_only=True, use_safetensors=True)
    return model.eval()


def score(model: torch.nn.Module, sequences: list[list[int]], temperature: float = 1.0) -> list[np.ndarray]:
    """Log-probs of all but the first token of each sequence, [n - 1] float32."""
    return [_taken(logprobs, tokens) for logprobs, tokens in _distributions(model, sequences, temperature)]


def score_with_entropy(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float = 1.0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of all but the first token of each sequence its log-prob and the entropy of what it was drawn from, [n - 1]
    float32 each, in nats."""
    return [
        (_taken(logprobs, tokens), torch.special.entr(logprobs.exp()).sum(-1).cpu().numpy())
        for logprobs, tokens in _distributions(model, sequences, temperature)
    ]


@torch.inference_mode()
def _distributions(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """[n - 1, V] float32 log-probs and the sequence they belong to, for each."""
    done = 0
    while done < len(sequences):
        batch = _batch(sequences[done:])
        done += len(batch)
        # padded on the right, where a causal model does not look
        rows = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        for row, tokens in zip(rows, batch, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        rows = rows.to(next(model.parameters()).device)
        logprobs = model(input_ids=rows, use_cache=False).logits[:, :-1].float().div(temperature).log_softmax(-1)
        for row, tokens in zip(logprobs, batch, strict=True):
            yield row[: len(tokens) - 1], tokens


def _taken(logprobs: torch.Tensor, tokens: list[int]) -> np.ndarray:
    drawn = torch.tensor(tokens[1:], device=logprobs.device)
    return logprobs.gather(1, drawn[:, None])[:, 0].cpu().numpy()


def _batch(sequences: Sequence[list[int]]) -> Sequence[list[int]]:
    """The first ones, as many as make `TOKENS_AT_ONCE` tokens with their padding, but at least one."""
    longest = 0
    for number, tokens in enumerate(sequences):
        longest = max(longest, len(tokens))
        if number and (number + 1) * longest > TOKENS_AT_ONCE:
            return sequences[:number]
    return sequences
