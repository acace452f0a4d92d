"""The rollout phase: engines with the stage's frozen policy answer all prompts of the stage; no trainer is in memory.

Where an evaluation of that policy is due, the engines answer the held-out prompts first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED
from megarl.phases.candidates import Candidates
from megarl.phases.evaluate import evaluate_due
from megarl.phases.generation import RolloutStats, missing_chunks, shared_chunks
from megarl.phases.partial_rollouts import PartialRollouts
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.stop import StopRequest
from megarl.storage.files import make_directory
from megarl.storage.rollouts import RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage


def rollout(stage: Stage) -> None:
    """Fill and seal the store of ``stage``. Groups that an earlier, killed attempt stored are not generated again."""
    stop = StopRequest()
    replicas = ReplicaGroup.join(while_waiting=stop.exit_if_asked)
    if replicas.from_first("is sealed", stage.is_sealed()):
        return  # restarted after a process died between sealing and its exit
    make_directory(stage.rollouts)
    worker = evaluate_due(stage, replicas, stop)
    if stage.rollout.token_budget is None:
        _rollout_whole(stage, replicas, worker)
    else:
        PartialRollouts(stage, replicas, worker).work(stage.rollout.token_budget)
    replicas.barrier("sealed")


def _rollout_whole(stage: Stage, replicas: ReplicaGroup, worker: RolloutWorker) -> None:
    """The rollouts of a stage without a token budget: each response is generated to its end."""
    whole, found = worker.engine.repeats_chunks, None
    candidates = Candidates(replicas, stage.groups, stage.run.recipe.groups_per_stage)
    if replicas.rank == 0:  # only rank 0 reads: other nodes may see an older state of a shared file system
        store = RolloutStore(stage.rollouts)
        candidates.publish_stored(store)
        found = store.missing(stage.groups)
    missing = set(replicas.from_first("missing", found))
    chunks, total = missing_chunks(stage.groups, missing, whole, stage.rollout.groups_per_chunk), len(stage.groups)
    if replicas.rank == 0 and (there := total - sum(map(len, chunks))) > 0:
        stage.log_event("resume", phase="rollout", skipped=there, total=total, unit="groups")
    next_chunk = shared_chunks(replicas, "all", chunks, worker.stopped)

    def take() -> Sequence[int] | None:
        chunk = next_chunk()
        return chunk if chunk and candidates.may_be_chosen(chunk) else None

    stats = RolloutStats(stage, replicas.rank, worker, candidates.add)
    with RolloutWriter(
        stage.rollouts, weights_hash=worker.weights_hash, logprob_mode="processed", writer=replicas.rank
    ) as writer:
        for groups in worker.generate(
            take,
            worker.prompts.train,
            worker.sampling(),
            interrupted=candidates.are_enough,
            scored_first=whole and candidates.chooses,  # else the speed of scoring would affect what is generated
            watch=stats.step,
        ):
            # a repeated chunk may contain groups that an earlier attempt has stored
            writer.append([group for group in groups if group.group_id in missing])
    stats.log()
    worker.close()
    if worker.stopped():
        sys.exit(STOPPED)  # without a barrier: the other replicas get the same signal
    replicas.barrier("generated")
    if replicas.rank == 0:
        if chosen := candidates.chosen():
            stage.log_event("dynamic_sampling", phase="rollout", **candidates.summary())
        seal(stage.rollouts, stage.groups, chosen)
