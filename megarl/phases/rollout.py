"""The rollout phase: the frozen policy of a stage answers all of the stage's prompts; nothing else holds memory.

Where an evaluation of that policy is due, the engines answer the held-out prompts first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED
from megarl.phases.candidates import Candidates
from megarl.phases.evaluate import evaluate_policy, start_worker
from megarl.phases.rollout_stats import RolloutStats
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.scoring import ScoredGroup, SeededPrompt
from megarl.phases.stop import StopRequest
from megarl.recipe.schedule import cut_chunks
from megarl.rollout.engine import never
from megarl.storage.files import make_directory
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

STORE_SECONDS = 1.0  # between two shards: a kill loses at most the groups completed in this time


def rollout(stage: Stage) -> None:
    """Fill and seal the store of ``stage``. What an earlier, killed attempt stored is not generated again."""
    stop = StopRequest()
    if stage.is_sealed():
        return  # a restart after a process that died between sealing and its end
    replicas = ReplicaGroup.join(leave=stop.exit_if_asked)
    make_directory(stage.rollouts)
    worker = start_evaluated(stage, replicas, stop)
    whole = worker.engine.repeats_chunks
    candidates, found = Candidates(replicas, stage.groups, stage.run.recipe.groups_per_stage), None
    if replicas.rank == 0:  # for everybody: others may see a shared file system as it was a moment ago
        store = RolloutStore(stage.rollouts)
        candidates.recall(store)
        found = store.missing(stage.groups)
    missing = set(replicas.from_first("missing", found))
    chunks = missing_chunks(stage, missing, whole)
    total = len(stage.groups)
    if replicas.rank == 0 and (there := total - sum(map(len, chunks))) > 0:
        stage.log_event("resume", phase="rollout", skipped=there, total=total, unit="groups")

    def take() -> Iterator[Sequence[int]]:
        # replicas take the next chunk from the shared counter, so that a slow one does not hold the others
        while not stop.asked and (number := replicas.store.add("next_chunk", 1) - 1) < len(chunks):
            if whole and candidates.chooses:
                worker.scoring.settle()  # so that what is generated does not depend on how fast it is scored
            if not candidates.may_be_chosen(chunks[number]):
                return
            yield chunks[number]

    def log_progress() -> None:
        event = stats.event(worker.decoding, worker.scoring.over_limit)
        stage.log_event("rollout_progress", rank=replicas.rank, **event)

    def seen(group: ScoredGroup) -> None:
        stats.add(group)
        candidates.add(group)

    # an engine that repeats whole chunks finishes the one it has begun
    interrupted = never if whole else lambda: stop.asked or candidates.are_enough()
    with RolloutWriter(
        stage.rollouts, weights_hash=worker.weights_hash, logprob_mode="processed", writer=replicas.rank
    ) as writer:
        stats = RolloutStats()
        for groups in generate(worker, take(), interrupted, seen=seen):
            # a chunk that is cut elsewhere than in an earlier attempt has groups that are there
            writer.append([group for group in groups if group.group_id in missing])
            if stats.due():
                log_progress()
    log_progress()
    worker.close()
    if stop.asked:
        sys.exit(STOPPED)  # the other replicas get the same signal
    replicas.barrier("generated")
    if replicas.rank == 0:
        if chosen := candidates.chosen():
            stage.log_event("dynamic_sampling", phase="rollout", **candidates.summary())
        seal(stage.rollouts, stage.groups, chosen)
    replicas.barrier("sealed")


def start_evaluated(stage: Stage, replicas: ReplicaGroup, stop: StopRequest) -> RolloutWorker:
    """The stage's engine, with which an evaluation that was due has been made."""
    evaluates = replicas.from_first("evaluates", stage.evaluation_is_due())
    worker = start_worker(stage, replicas, "evaluate" if evaluates else "rollout", for_training=True)
    if evaluates:
        evaluate_policy(stage, worker, replicas, lambda: stop.asked)
    if stop.asked:  # also because responses to held-out prompts may be unfinished, which are not for the store
        worker.close()
        sys.exit(STOPPED)
    return worker


def missing_chunks(stage: Stage, missing: Collection[int], whole: bool) -> list[Sequence[int]]:
    """What is still to be generated, as the chunks that engines take.

    whole: the composition of a batch changes the last bits of its log-probs, so chunks of ``groups_per_chunk`` groups
    are always cut at the same places, and a resumed phase repeats all of a chunk: then it repeats it exactly. Else
    single groups, so that an engine takes as many as it has room for.
    """
    groups, schedule = stage.groups, stage.run.recipe.schedule
    if not whole:
        return [[group] for group in groups if group in missing]
    interval = schedule.sync_every * schedule.prompts_per_update if schedule.sync_every else len(groups)
    parts = cut_chunks(groups, interval, stage.run.recipe.rollout.groups_per_chunk)
    return [part for part in parts if any(group in missing for group in part)]


def generate(
    worker: RolloutWorker,
    chunks: Iterator[Sequence[int]],
    interrupted: Callable[[], bool] = never,
    store_seconds: float = STORE_SECONDS,
    seen: Callable[[ScoredGroup], None] = lambda group: None,
) -> Iterator[list[Group]]:
    """The groups of ``chunks``, in portions to be stored: what became whole meanwhile, or a chunk to be repeated.

    ``seen`` is called with every group as soon as it is scored, before it is stored.
    """
    table, sizes = worker.recipe.rollout, []
    whole = worker.engine.repeats_chunks and interrupted is never

    def seeded_prompts() -> Iterator[list[SeededPrompt]]:
        for chunk in chunks:
            sizes.append(len(chunk))
            yield [SeededPrompt(group, worker.prompts.train(group)) for group in chunk]

    portion: list[Group] = []
    stored = time.monotonic()
    for scored in worker.generate(seeded_prompts(), table.responses_per_prompt, table.temperature, interrupted, seen):
        seeded = scored.seeded
        portion.append(Group(seeded.number, np.asarray(seeded.prompt.tokens, np.int32), scored.responses))
        # those of a chunk that is to be repeated come one after another
        if len(portion) == sizes[scored.chunk] if whole else time.monotonic() - stored >= store_seconds:
            yield portion
            portion, stored = [], time.monotonic()
    if portion:
        yield portion
