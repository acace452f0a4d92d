"""The rollout phase: the frozen policy of a stage answers all of the stage's prompts; nothing else holds memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from megarl.distributed import join_process_group
from megarl.errors import STOPPED
from megarl.files import make_directory
from megarl.phases.answers import Answerer
from megarl.phases.stop import StopRequest
from megarl.rollout.engine import response_seed
from megarl.run_dir import RunDir
from megarl.store import Group, RolloutStore, RolloutWriter, seal


def rollout(run: RunDir, stage: int) -> None:
    """Fill and seal the store of ``stage``. What an earlier, killed attempt stored is not generated again."""
    stop = StopRequest()
    if run.is_sealed(stage):
        return  # a restart after a process that died between sealing and its end
    counter = join_process_group("gloo")
    directory = run.rollouts(stage)
    make_directory(directory)
    chunks = _agreed(missing_chunks(run, stage) if dist.get_rank() == 0 else [])
    if dist.get_rank() == 0 and (there := len(run.groups(stage)) - sum(map(len, chunks))):
        total = len(run.groups(stage))
        run.log_event("resume", phase="rollout", stage=stage, skipped=there, total=total, unit="groups")
    answerer = Answerer.build(run.recipe, run.policy(stage))
    with RolloutWriter(
        directory, weights_hash=answerer.weights_hash, logprob_mode="processed", writer=dist.get_rank()
    ) as writer:
        # replicas take the next chunk from the shared counter, so that a slow one does not hold the others
        while not stop.asked and (number := counter.add("next_chunk", 1) - 1) < len(chunks):
            writer.append(generate(answerer, chunks[number]))
    answerer.engine.close()
    if stop.asked:
        sys.exit(STOPPED)  # the others are told, too
    dist.barrier()
    if dist.get_rank() == 0:
        seal(directory, run.groups(stage))
    dist.barrier()


def _agreed(chunks: list[range]) -> list[range]:
    """Rank 0's, for everybody: others may see a shared file system as it was a moment ago."""
    box = [chunks]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def missing_chunks(run: RunDir, stage: int) -> list[range]:
    """Chunks of groups still to be generated, always cut at the same places.

    The composition of a batch changes the last bits of its log-probs, so a chunk is the unit that a resumed phase
    repeats: then it repeats it exactly.
    """
    groups, size = run.groups(stage), run.recipe.rollout.groups_per_chunk
    missing = set(RolloutStore(run.rollouts(stage)).missing(groups))
    chunks = [groups[i : i + size] for i in range(0, len(groups), size)]
    return [chunk for chunk in chunks if not missing.isdisjoint(chunk)]


def generate(answerer: Answerer, groups: Sequence[int]) -> list[Group]:
    recipe = answerer.recipe
    samples = recipe.rollout.responses_per_prompt
    prompts = [answerer.prompts.train(group) for group in groups]
    seeds = [response_seed(recipe.run.seed, group, sample) for group in groups for sample in range(samples)]
    answers = answerer.answer(prompts, seeds, samples, recipe.rollout.temperature)
    return [
        Group(group, np.asarray(prompt.tokens, np.int32), responses)
        for group, prompt, responses in zip(groups, prompts, answers, strict=True)
    ]
