"""The rescore phase: gives frozen rollouts new rewards, by another ``[reward]``. Runs verifiers, but no engine.

The prompts of a stage that was filled from outside are known only as tokens. A verifier gets their text, and as column
``rewards`` of the row the rewards that the group's responses came with.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from megarl.data.prompts import Prompt, open_prompts
from megarl.heartbeats import beat
from megarl.phases.scoring import Scoring, text_of
from megarl.phases.stop import StopRequest
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.storage.files import make_directory
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RESCORED, SCORED_BEFORE, Stage

GROUPS_AT_ONCE = 64  # groups that are scored at a time and stored in one shard


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
    decode = text_of(tokenizer)
    scoring = Scoring(verifiers, recipe.reward, decode, True, recipe.rollout.max_response_tokens)
    first = source.entries[0]
    with RolloutWriter(target, weights_hash=first.weights_hash, logprob_mode=first.logprob_mode) as writer:
        missing = RolloutStore(target).missing(source.group_ids)
        for begin in range(0, len(missing), GROUPS_AT_ONCE):
            if stop.asked:
                break
            beat("scoring", f"group {missing[begin]}")
            groups = source.read(missing[begin : begin + GROUPS_AT_ONCE])
            writer.append(
                scoring.again(
                    groups, lambda group: _given(group, decode) if source.external else prompts.train(group.group_id)
                )
            )
    scoring.close()
    stop.exit_if_asked()
    chosen = list(source.chosen) if len(source.chosen) < len(source.group_ids) else None
    seal(target, stage.groups, chosen, external=source.external)


def _given(group: Group, decode: Callable[[np.ndarray], str]) -> Prompt:
    """The prompt of a group from outside, as far as it is known."""
    rewards = [response.reward for response in group.responses]
    return Prompt(group.group_id, decode(group.prompt_tokens), (), "", {"metadata": {"rewards": rewards}})
