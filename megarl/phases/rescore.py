"""The rescore phase: gives frozen rollouts new rewards, by another ``[reward]``. Runs verifiers, but no engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

from megarl.data.prompts import open_prompts
from megarl.heartbeats import beat
from megarl.phases.generation import STORE_SECONDS
from megarl.phases.scoring import PendingGroup, Scoring, SeededPrompt
from megarl.phases.stop import StopRequest
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.storage.files import make_directory
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RESCORED, SCORED_BEFORE, Stage

GROUPS_AT_ONCE = 64  # groups that are being scored at a time


def rescore(stage: Stage) -> None:
    """Score the groups of the original store again and write them to the stage's own store, which is then sealed.

    After a kill, groups that are stored already are not scored again. Only rank 0 does anything.
    """
    if os.environ["RANK"] != "0":
        return
    stop = StopRequest()
    recipe, root = stage.run.recipe, stage.run.root
    source, target = (RolloutStore(root / SCORED_BEFORE / stage.directory.name), root / RESCORED / stage.directory.name)
    make_directory(target)
    tokenizer, prompts = open_prompts(recipe, stage.policy)
    verifiers = VerifierPool(lambda: build_verifier(recipe, prompts), Limits.of_this_process(recipe))
    scoring = Scoring(verifiers, recipe.reward, True, recipe.rollout.max_response_tokens)
    first = source.entries[0]
    with RolloutWriter(target, weights_hash=first.weights_hash, logprob_mode=first.logprob_mode) as writer:
        missing = RolloutStore(target).missing(source.group_ids)
        stored = time.monotonic()
        portion: list[Group] = []
        for begin in range(0, len(missing), GROUPS_AT_ONCE):
            if stop.asked:
                break
            beat("scoring", f"group {missing[begin]}")
            groups = source.read(missing[begin : begin + GROUPS_AT_ONCE])
            for group in groups:
                pending = PendingGroup(
                    0, SeededPrompt(group.group_id, prompts.train(group.group_id)), len(group.responses)
                )
                for sample, response in enumerate(group.responses):
                    text = str(tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True))
                    scoring.add(pending, sample, replace(response, correct=None), text)
            scoring.wait_for_all()
            portion += _scored(groups, scoring)
            if time.monotonic() - stored > STORE_SECONDS:
                writer.append(portion)
                stored, portion = time.monotonic(), []
        writer.append(portion)
    scoring.close()
    stop.exit_if_asked()
    seal(target, stage.groups, list(source.chosen) if len(source.chosen) < len(source.group_ids) else None)


def _scored(groups: list[Group], scoring: Scoring) -> Iterator[Group]:
    responses = {scored.seeded.number: scored.responses for scored in scoring.take()}
    for group in groups:
        yield Group(group.group_id, group.prompt_tokens, responses[group.group_id])
