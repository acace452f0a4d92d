"""The weight-drift check: does an engine with newly loaded weights give text of the run the actor's log-probs?

A wrong weight sync raises no error anywhere; rewards collapse some updates later. So every load is checked.

In bfloat16 two implementations differ by more than a policy moves in a few updates, so a tolerance alone cannot detect
slightly stale weights. Two sums over the tokens can, because rounding errors are independent of the updates and average
out. With e the engine's log-probs, n those of the new policy and p those of the previous one (both computed by the
actor), and q the log-probs that the engine stored for the same text when it had the previous policy:

- |e - p|^2 - |e - n|^2 is negative if the engine is nearer to the previous policy;
- (e - n)(p - n) + (q - p)(p - n) has mean 0 if the engine has the new weights now and had the previous ones then,
  however actor and engine round. If some of its weights are stale, the mean is |p - n|^2 times the missing share of the
  change.

If an engine offers checksums of its weights, the checksum must also change when another policy is loaded. This detects
stale weights however little the policy has moved.

A token whose experts are nearly tied may be routed elsewhere, which may move its log-prob and later ones by whole nats.
In the two sums differences are therefore clipped. In float32 this is too rare to happen to two sequences: one may be
off, and counts only in a mean over all tokens, with a wider limit.

Prompts are text that the policy did not choose: its log-probs are lower there, and rounding moves them further. A limit
that comes from responses is therefore one for responses alone, and that for a base model, which is compared on prompts
with another implementation than the actor's, is wide: between `DOUBTFUL` and `WIDE` nats there is only a warning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.errors import UserError
from megarl.rollout.engine import EngineFault, Request, RolloutEngine, Sampling, answers
from megarl.storage.policies import Reference

# Allowed distance in nats: (at a single token, mean over all). Two float32 implementations of a model with 30 layers
# differ by 2e-5 in the mean and by up to 2e-4 at one of 2,300 tokens (benchmarks/engines.py). In bfloat16 a token whose
# experts are nearly tied may be routed elsewhere, so only the mean is limited; quantised weights change every token's
# log-prob.
TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (math.inf, 0.1), "quantised": (math.inf, 0.5)}
WIDE = {"float32": 0.1, "bfloat16": 0.3, "quantised": 0.5}  # mean over tokens that rounding moves most, in nats
DOUBTFUL = 0.05  # mean distance in nats of an engine with a base model in bfloat16 above which there is a warning
# Where q is known, its mean distance from p shows how far engine and actor are apart with the same weights. The limit
# of their mean distance is then NOISES times that, but at least LEAST_NOISE nats and at most the limit above.
NOISES, LEAST_NOISE = 3.0, 0.02
SIGNIFICANT, MISSING = 4.0, 0.1  # limits: standard errors, and the missing share of the change between two policies
BLOCK = 16  # tokens summed before the standard error is estimated: an error at one token carries over to the next ones
TOKENS_AT_ONCE = 512  # batch of transformers, padding included; logits of a large vocabulary take 0.6 MB per token
SAMPLES, SAMPLED_TOKENS = 4, 16  # responses (and tokens of each) sampled to compare with the engine's own scores


@dataclass(frozen=True)
class Drift:
    """Distance in nats of an engine's log-probs from the actor's, and its position between new and previous policy."""

    max: float  # largest distance at a token that was compared
    mean: float  # mean distance over these tokens
    tokens: int  # their number
    precision: str  # a key of TOLERANCES: the coarser of the engine's and the actor's
    nearer: float | None = None  # by how many standard errors it is nearer to the new policy than to the previous one
    missing: float | None = None  # the share of the change from the previous to the new policy that it lacks
    missing_errors: float | None = None  # ``missing`` in standard errors
    sampled: float = 0.0  # mean distance of the log-probs of sampled tokens from the engine's own scores of them
    checksum: str | None = None  # of the engine's weights, if the engine offers one
    warning: str = ""  # for the user; "" if there is no doubt


def measure_drift(engine: RolloutEngine, reference: Reference, before: str | None = None) -> Drift:
    """Compare the engine's log-probs with the actor's, and those of tokens it samples with its own scores of them.

    Raises `EngineFault` if they differ by more than rounding. before: the checksum of the engine's weights when it had
    another policy; None if it had none or offers no checksums.
    """
    checksum = engine.checksum()
    # updates without a gradient leave the policy as it was
    still = reference.previous is not None and all(map(np.array_equal, reference.previous, reference.logprobs))
    if checksum is not None and checksum == before and not still:
        raise _wrong_weights(": loading the policy left the engine's previous weights unchanged, bit for bit")
    drift = judge(engine.score(reference.sequences), reference, engine.precision)
    prompts = [sequence[: max(1, len(sequence) // 2)] for sequence in reference.sequences[:SAMPLES]]
    tokens = min([SAMPLED_TOKENS, *(len(s) - len(p) for s, p in zip(reference.sequences, prompts, strict=False))])
    how = Sampling(1.0, tokens, 1, (), seeds=tuple(range(len(prompts))))
    completions = answers(engine, Request(prompts, how))
    whole = [[*prompts[c.prompt], *c.tokens.tolist()] for c in completions]
    own = [score[-len(c.tokens) :] for score, c in zip(engine.score(whole), completions, strict=True)]
    sampled = _distances([c.logprobs for c in completions], own)
    if not _tolerable(sampled, TOLERANCES[engine.precision]):
        raise EngineFault(
            f"the log-probs that the engine returns for tokens it samples differ from its own scores of the same "
            f"{len(sampled)} tokens, by {sampled.mean():.3g} nats in the mean and up to {sampled.max():.3g} at a "
            "token. Does an option of [rollout.vllm] or [rollout.sglang], such as speculative decoding, change them?"
        )
    return replace(drift, sampled=float(sampled.mean()), checksum=checksum)


def judge(scored: Sequence[np.ndarray], reference: Reference, precision: str) -> Drift:
    """Compare ``scored``, an engine's log-probs of the reference's sequences, with the actor's.

    precision: the engine's, a key of `TOLERANCES`. Raises `EngineFault` if the engine must have wrong weights.
    """
    precision = max(precision, reference.precision, key=lambda name: TOLERANCES[name][1])
    everywhere = distances = _distances(scored, reference.logprobs)
    largest, mean = TOLERANCES[precision]
    if precision == "float32":
        if reference.experts and not _tolerable(distances, (largest, mean)):
            distances = _without_the_worst(scored, reference.logprobs)
    elif reference.base:
        mean = WIDE[precision]
    elif reference.previous is not None and any(map(len, reference.stored or ())):
        stored = _where_stored(reference.stored or (), reference)
        usual = _distances(stored, _where_stored(reference.previous, reference))
        distances = _distances(_where_stored(scored, reference), _where_stored(reference.logprobs, reference))
        mean = min(mean, max(LEAST_NOISE, NOISES * float(usual.mean())))
    place: dict[str, Any] = _place(scored, reference)
    drift = Drift(float(distances.max()), float(distances.mean()), len(distances), precision, **place)
    if not _tolerable(distances, (largest, mean)):
        raise _wrong_weights(
            f": its log-probs of {drift.tokens} tokens are {drift.mean:.3g} nats off in the mean and up to "
            f"{drift.max:.3g} at a token; the limits for {precision} are {mean:.3g} and {largest:g} here"
        )
    if not _tolerable(everywhere, (math.inf, WIDE[precision])):
        left_out = "prompts" if precision != "float32" else "the sequence that differs most"
        raise _wrong_weights(
            f": its log-probs of {len(everywhere)} tokens are {everywhere.mean():.3g} nats off in the mean, with "
            f"{left_out}"
        )
    if place and place["nearer"] < -SIGNIFICANT:
        raise _wrong_weights(
            f" but those of the previous policy: its log-probs of {len(everywhere)} tokens are nearer to that one by "
            f"{-place['nearer']:.1f} standard errors"
        )
    if place.get("missing", 0) > MISSING and place["missing_errors"] > SIGNIFICANT:
        raise _wrong_weights(
            f": some are those of the previous policy. Its log-probs of {len(everywhere)} tokens lack "
            f"{place['missing']:.0%} of the change from that policy to this one ({place['missing_errors']:.1f} "
            "standard errors)"
        )
    if reference.base and precision == "bfloat16" and drift.mean > DOUBTFUL:
        warning = (
            f"the engine's log-probs of {drift.tokens} tokens of prompts are {drift.mean:.3g} nats off those that "
            f"transformers computes for the base model (refused above {mean:g}). Rounding can explain that where there "
            "are many experts or layers; so can an option of the engine: read some responses before you go on"
        )
        return replace(drift, warning=warning)
    return drift


def _wrong_weights(why: str) -> EngineFault:
    return EngineFault(f"the engine's weights are not the policy's{why}. Nothing was generated with them")


def _where_stored(values: Sequence[np.ndarray], reference: Reference) -> list[np.ndarray]:
    """``values`` at the tokens whose log-probs the engine stored with the previous policy: tokens of responses."""
    counts = map(len, reference.stored or ())
    return [own[-count:] for own, count in zip(values, counts, strict=True) if count]


def _tolerable(distances: np.ndarray, limits: tuple[float, float]) -> bool:
    return bool(distances.max() <= limits[0] and distances.mean() <= limits[1])  # False for NaN


def _distances(scored: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """[tokens] float64: absolute differences at the tokens of all sequences."""
    return np.abs(np.concatenate(scored).astype(np.float64) - np.concatenate(expected))


def _without_the_worst(scored: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """`_distances` without the sequence that differs most; of all if there is only one."""
    apart = [_distances([a], [b]) for a, b in zip(scored, expected, strict=True)]
    worst = max(range(len(apart)), key=lambda number: apart[number].sum())
    return np.concatenate(apart[:worst] + apart[worst + 1 :] or apart)


def _place(scored: Sequence[np.ndarray], reference: Reference) -> dict[str, float]:
    """The fields of `Drift` that compare with the previous policy; {} if there is none or it has not changed."""
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
    """Sums over blocks of `BLOCK` tokens."""
    sums: list[float] = np.add.reduceat(values.astype(np.float64), np.arange(0, len(values), BLOCK)).tolist()
    return sums


def _in_errors(parts: list[float]) -> float:
    """A sum of independent parts divided by its standard error, estimated from the parts; 0 if all are 0."""
    error = float(np.sqrt(np.square(parts).sum()))
    return sum(parts) / error if error else 0.0


def hugging_face_reference(policy_dir: Path, sequences: list[list[int]], temperature: float = 1.0) -> Reference:
    """A reference for a base model, which no actor has exported: its log-probs by transformers on the CPU.

    The model is computed in the precision of its file, by all cores of this machine. `UserError` if its log-probs are
    not finite.
    """
    model, threads = load_model(policy_dir), torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        logprobs = score(model, sequences, temperature)
    finally:
        torch.set_num_threads(threads)
    if not all(np.isfinite(own).all() for own in logprobs):
        raise UserError(f"the model in {policy_dir} gives log-probs that are not finite: are its weights damaged?")
    precision = "float32" if model.dtype == torch.float32 else "bfloat16"
    return Reference(sequences=sequences, logprobs=logprobs, precision=precision, base=True)


def load_model(policy_dir: Path) -> Any:
    """Load a policy as a transformers model on the CPU, in the precision of its file but for the head: in float32."""
    from transformers import AutoModelForCausalLM  # takes seconds
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype="auto", local_files_only=True, use_safetensors=True)
    head = model.get_output_embeddings()  # in float32, as actor and engines: bfloat16 rounds a logit of 20 by .06
    for name, parameter in list(head.named_parameters()):
        setattr(head, name, torch.nn.Parameter(parameter.float()))  # another one, since embeddings may share the old
    head.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    return model.eval()


def score(model: torch.nn.Module, sequences: list[list[int]], temperature: float = 1.0) -> list[np.ndarray]:
    """For each sequence of n tokens, [n - 1] float32: the log-probs in nats of all tokens but the first."""
    return [_logprobs_of(logprobs, tokens) for logprobs, tokens in _distributions(model, sequences, temperature)]


def score_with_entropy(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float = 1.0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `score`, with the entropy of each of these tokens' distributions: two [n - 1] float32 in nats a sequence."""
    return [
        (_logprobs_of(logprobs, tokens), torch.special.entr(logprobs.exp()).sum(-1).cpu().numpy())
        for logprobs, tokens in _distributions(model, sequences, temperature)
    ]


@torch.inference_mode()
def _distributions(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield for each sequence its [n - 1, V] float32 log-probs, and the sequence itself."""
    done = 0
    while done < len(sequences):
        batch = _batch(sequences[done:])
        done += len(batch)
        # padding on the right needs no mask: a causal model does not attend to later positions
        rows = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        for row, tokens in zip(rows, batch, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        rows = rows.to(next(model.parameters()).device)
        logprobs = model(input_ids=rows, use_cache=False).logits[:, :-1].float().div(temperature).log_softmax(-1)
        for row, tokens in zip(logprobs, batch, strict=True):
            yield row[: len(tokens) - 1], tokens


def _logprobs_of(logprobs: torch.Tensor, tokens: list[int]) -> np.ndarray:
    """[n - 1]: the log-probs of the sequence's own tokens, from those of the vocabulary [n - 1, V]."""
    targets = torch.tensor(tokens[1:], device=logprobs.device)
    return logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()


def _batch(sequences: Sequence[list[int]]) -> Sequence[list[int]]:
    """The first sequences that have at most `TOKENS_AT_ONCE` tokens together, padding included; at least one."""
    longest = 0
    for number, tokens in enumerate(sequences):
        longest = max(longest, len(tokens))
        if number and (number + 1) * longest > TOKENS_AT_ONCE:
            return sequences[:number]
    return sequences
