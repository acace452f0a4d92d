"""Recomputes prompt, rewards and log-probs of some groups of each stage, and compares them with the stored ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megarl.data.prompts import PromptSource, open_prompts
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.phases.scoring import Scoring, text_of
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rollout.drift import TOLERANCES, hugging_face_reference
from megarl.storage.ledger import sealed_external
from megarl.storage.policies import weight_files
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import RunDir, Stage

LARGEST_MODEL = 2 << 30  # bytes of weights; log-probs of larger models are not recomputed
MANY_GROUPS = 8  # with so many, one may differ
TOKENS = 1024  # response tokens per stage whose log-probs are recomputed


def check_samples(run: RunDir, count: int, notes: list[str]) -> Iterator[str]:
    """Problems of ``count`` random groups per stage. ``notes`` gets what could not be recomputed, and why."""
    had_policy = [stage for stage in run.stages() if stage.policy.exists() or stage.policy_was_removed()]
    stages = [stage for stage in had_policy if count and stage.rollouts.exists()]
    if not stages:
        return
    try:
        whole = next((stage.policy for stage in stages if stage.policy.exists()), run.base)
        tokenizer, prompts = open_prompts(run.recipe, whole)
    except UserError as error:
        notes.append(f"no prompt and no reward was recomputed: {error}")
        return
    scorings: dict[str, Scoring] = {}  # by the settings of the reward, which may change from a stage on
    if run.recipe.reward.service:
        notes.append("no reward was recomputed: a service gives them, and its answers may differ now")
    try:
        for stage in stages:
            groups, recipe = sample(stage, count), stage.run.recipe
            if sealed_external(stage.rollouts):
                notes.append(f"stage {stage.number} was filled from outside: no prompt and no reward was compared")
            else:
                yield from _check_prompts(stage, groups, prompts)
                if not run.recipe.reward.service:
                    name = repr((recipe.reward, stage.rollout.max_response_tokens))
                    scorings[name] = scorings.get(name) or _scoring(stage, prompts, tokenizer)
                    yield from _check_rewards(stage, groups, prompts, scorings[name])
            yield from _check_logprobs(stage, groups, notes)
    except (UserError, RuntimeError) as error:
        notes.append(f"not all rewards were recomputed: {error}")
    finally:
        for scoring in scorings.values():
            scoring.close()


def _scoring(stage: Stage, prompts: PromptSource, tokenizer: Any) -> Scoring:
    recipe = stage.run.recipe
    pool = VerifierPool(lambda: build_verifier(recipe, prompts), Limits.of_this_process(recipe))
    return Scoring(pool, recipe.reward, text_of(tokenizer), True, stage.rollout.max_response_tokens)


def sample(stage: Stage, count: int) -> list[Group]:
    """``count`` random groups that the stage trains; the same ones each time."""
    try:
        store = RolloutStore(stage.rollouts, one_policy=stage.run.recipe.schedule.one_policy)
        present = [group for group in store.chosen if not store.missing([group])]
        chosen = random.Random(stage.number).sample(present, min(count, len(present)))
        return store.read(sorted(chosen))
    except UserError:
        return []  # `check_rollouts` reports it


def _check_prompts(stage: Stage, groups: Sequence[Group], prompts: PromptSource) -> Iterator[str]:
    for group in groups:
        if prompts.train(group.group_id).tokens != tuple(group.prompt_tokens.tolist()):
            yield f"group {group.group_id} of stage {stage.number} has another prompt than the data has for this number"


def _check_rewards(stage: Stage, groups: Sequence[Group], prompts: PromptSource, scoring: Scoring) -> Iterator[str]:
    again = scoring.again(groups, lambda group: prompts.train(group.group_id))
    for group, scored in zip(groups, again, strict=True):
        for number, (response, now) in enumerate(zip(group.responses, scored.responses, strict=True)):
            if (now.reward, now.correctness) != (response.reward, response.correctness):
                where = f"response {number} of group {group.group_id}"
                yield f"{where} has reward {response.reward:g}, but its verifier says {now.reward:g}"


def _check_logprobs(stage: Stage, groups: Sequence[Group], notes: list[str]) -> Iterator[str]:
    if why := _cannot_score(stage):
        notes.append(f"no log-prob of stage {stage.number} was recomputed: {why}")
        return
    pairs, left = [], TOKENS
    for group in groups:
        for response in group.responses[:2]:
            if left > 0 and response.versions[-1] == stage.first_update:
                pairs.append((group, response))
                left -= len(response.tokens)
    if not pairs:
        return
    sequences = [[*group.prompt_tokens.tolist(), *response.tokens.tolist()] for group, response in pairs]
    reference = hugging_face_reference(stage.policy, sequences, stage.rollout.temperature)
    # without the tokens of a continued response that policies of earlier stages sampled
    here = [response.sampled & (response.versions == stage.first_update) for _, response in pairs]
    stored = [response.rollout_logprobs[mine] for (_, response), mine in zip(pairs, here, strict=True)]
    own = [scores[-len(mine) :][mine] for scores, mine in zip(reference.logprobs, here, strict=True)]
    # TOLERANCES of bfloat16 bound the mean difference alone: the engine's bfloat16 is compared with float32 here
    engine = "float32" if stage.rollout.engine == "builtin" and stage.run.recipe.actor.backend == "cpu" else "bfloat16"
    differences: dict[int, list[np.ndarray]] = {}  # by group
    for (group, _), ours, theirs in zip(pairs, own, stored, strict=True):
        differences.setdefault(group.group_id, []).append(np.abs(ours - theirs))
    by_group = {number: np.concatenate(found) for number, found in differences.items()}
    if engine == "float32" and read_hf_config(stage.policy)["num_experts"]:
        by_group = _without_a_tie(by_group)
    distances = np.concatenate(list(by_group.values()))
    largest, mean = TOLERANCES[engine]
    if not (distances.max() <= largest and distances.mean() <= mean):
        worst = max(by_group, key=lambda number: by_group[number].sum())
        yield (
            f"the log-probs of stage {stage.number} are not its policy's: over {len(distances)} tokens they differ by "
            f"{distances.mean():.3g} nats in the mean and up to {distances.max():.3g}, the most in group {worst}"
        )


def _without_a_tie(by_group: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """``by_group`` without the group that differs most, if there are many and it does not differ grossly.

    Rounding decides between experts whose scores are nearly equal, and when transformers recomputes a prompt it may
    decide otherwise. That moves log-probs of all responses to the prompt, and is too rare to happen to two of them.
    """
    worst = max(by_group, key=lambda number: by_group[number].sum())
    tolerable = np.concatenate(list(by_group.values())).mean() <= TOLERANCES["bfloat16"][1]  # False for NaN
    if len(by_group) < MANY_GROUPS or not tolerable:
        return by_group
    return {number: found for number, found in by_group.items() if number != worst}


def _cannot_score(stage: Stage) -> str | None:
    if not stage.run.recipe.schedule.one_policy:
        return "several policies generated it, which have been removed"
    if not stage.policy.exists():
        return "its policy was removed by retention"
    size = sum(path.stat().st_size for path in weight_files(stage.policy))
    if size > LARGEST_MODEL:
        return f"the policy has {size / 2**30:.1f} GiB, more than {LARGEST_MODEL / 2**30:.0f} GiB"
    return None
