"""The rescore phase: frozen rollouts with the rewards of another verifier. Verifiers alone; no engine, no model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

from megarl.beats import beat
from megarl.data.prompts import open_prompts
from megarl.phases.generation import STORE_SECONDS
from megarl.phases.scoring import PendingGroup, Scoring, SeededPrompt
from megarl.phases.stop import StopRequest
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.storage.files import make_directory
from megarl.storage.origin import RESCORED, SCORED_BEFORE
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

IN_HAND = 64  # groups that are being scored at a time


def rescore(stage: Stage) -> None:
    """Fill and seal the stage's store with what the linked one has, scored anew. Stored groups stay after a kill.

    Of several nodes the first one does it.
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
        for begin in range(0, len(missing), IN_HAND):
            if stop.asked:
                break
            beat("scoring", f"group {missing[begin]}")
            groups = source.read(missing[begin : begin + IN_HAND])
            for group in groups:
                pending = PendingGroup(
                    0, SeededPrompt(group.group_id, prompts.train(group.group_id)), len(group.responses)
                )
                for sample, response in enumerate(group.responses):
                    text = str(tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True))
                    scoring.add(pending, sample, replace(response, correct=None), text)
            scoring.settle()
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
