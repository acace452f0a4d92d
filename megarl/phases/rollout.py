"""The rollout phase: the frozen policy of a stage answers all of the stage's prompts; nothing else holds memory.

Where an evaluation of that policy is due, the engines answer the held-out prompts first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED
from megarl.phases.candidates import Candidates
from megarl.phases.evaluate import start_evaluated
from megarl.phases.generation import generate_rollouts, missing_chunks
from megarl.phases.partial_rollouts import PartialRollouts
from megarl.phases.rollout_stats import RolloutStats
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.scoring import ScoredGroup
from megarl.phases.stop import StopRequest
from megarl.rollout.engine import never
from megarl.storage.files import make_directory
from megarl.storage.rollouts import RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage


def rollout(stage: Stage) -> None:
    """Fill and seal the store of ``stage``. What an earlier, killed attempt stored is not generated again."""
    stop = StopRequest()
    if stage.is_sealed():
        return  # a restart after a process that died between sealing and its end
    replicas = ReplicaGroup.join(while_waiting=stop.exit_if_asked)
    make_directory(stage.rollouts)
    worker = start_evaluated(stage, replicas, lambda: stop.asked)
    if stop.asked:  # also because responses of an evaluation may be unfinished, which are not for the store
        worker.close()
        sys.exit(STOPPED)
    if stage.rollout.token_budget is None:
        _rollout_whole(stage, replicas, worker, stop)
    else:
        PartialRollouts(stage, replicas, worker, stop).work(stage.rollout.token_budget)
    replicas.barrier("sealed")


def _rollout_whole(stage: Stage, replicas: ReplicaGroup, worker: RolloutWorker, stop: StopRequest) -> None:
    """Each response is generated to its end."""
    whole, found = worker.engine.repeats_chunks, None
    candidates = Candidates(replicas, stage.groups, stage.run.recipe.groups_per_stage)
    if replicas.rank == 0:  # for everybody: others may see a shared file system as it was a moment ago
        store = RolloutStore(stage.rollouts)
        candidates.recall(store)
        found = store.missing(stage.groups)
    missing = set(replicas.from_first("missing", found))
    chunks, total = missing_chunks(stage.groups, missing, whole, stage.rollout.groups_per_chunk), len(stage.groups)
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
        for groups in generate_rollouts(worker, take(), interrupted, seen=seen):
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
