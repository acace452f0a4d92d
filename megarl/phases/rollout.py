"""The rollout phase: engines with the stage's frozen policy answer all prompts of the stage; no trainer is in memory.

Where an evaluation of that policy is due, the engines answer the held-out prompts first. With a token budget (partial
rollouts: BAPO, section 5.3) responses stop at it, and groups with unfinished ones are carried on to later stages;
`Stage.candidates` describes the rules.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED
from megarl.phases.candidates import Candidates
from megarl.phases.evaluate import evaluate_due
from megarl.phases.generation import RolloutStats, missing_chunks, shared_chunks
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.stop import StopRequest
from megarl.storage.files import make_directory
from megarl.storage.ledger import SEALED
from megarl.storage.rollouts import Response, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage
from megarl.storage.shards import any_unfinished


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
    _end(replicas, worker, stats, "generated")
    worker.close()
    if replicas.rank == 0:
        if chosen := candidates.chosen():
            stage.log_event("dynamic_sampling", phase="rollout", **candidates.summary())
        seal(stage.rollouts, stage.groups, chosen)


def _end(replicas: ReplicaGroup, worker: RolloutWorker, stats: RolloutStats, name: str) -> None:
    """Wait until all replicas have generated; exit if asked to stop."""
    stats.log()
    if worker.stopped():
        worker.close()
        sys.exit(STOPPED)  # without a barrier: the other replicas get the same signal
    replicas.barrier(name)


class PartialRollouts:
    """One replica's part in generating the candidates of ``stage`` and in sealing its two stores.

    The candidates are the groups that the stage begins and those carried into it. Every candidate is generated up to
    the token budget. If fewer are complete then than the stage trains, the first unfinished ones are generated to their
    end. Stored groups are not generated again after a restart.
    """

    def __init__(self, stage: Stage, replicas: ReplicaGroup, worker: RolloutWorker) -> None:
        self.stage, self.replicas, self.worker = stage, replicas, worker
        self.candidates, self.stats = stage.candidates(), RolloutStats(stage, replicas.rank, worker)

    def work(self, budget: int) -> None:
        """Generate and seal; ends the process when asked to stop. budget: tokens that each response gets in a stage."""
        plan = self.replicas.from_first("partial", self._prepare() if self.replicas.rank == 0 else None)
        before = self.stage.previous.unfinished if plan["continued"] else None
        self._generate("budget", [plan["continued"], self.stage.groups], plan["missing"], before, budget)
        needed = self.replicas.from_first("needed", self._needed() if self.replicas.rank == 0 else None)
        self._generate("needed", [needed["groups"]], needed["missing"], self.stage.unfinished, math.inf)
        self.worker.close()
        if self.replicas.rank == 0:
            self._seal()

    def _prepare(self) -> dict[str, list[int]]:
        """Rank 0: tidy the stores of an earlier attempt and copy carried groups that are complete into this stage's.

        Returns the groups to generate as {"continued": unfinished groups carried into the stage, "missing": all groups
        that are not stored yet}.
        """
        stage = self.stage
        make_directory(stage.unfinished)
        (stage.unfinished / SEALED).unlink(missing_ok=True)  # if a kill came between the two seals
        continued: list[int] = []
        complete: list[int] = []
        if carried := stage.continued_groups():
            before = RolloutStore(stage.previous.rollouts)
            continued = before.missing(carried)
            complete = sorted(set(carried).difference(continued))
            with self._writer(stage.rollouts) as writer:  # so that all groups that this stage trains are in its store
                left, size = RolloutStore(stage.rollouts).missing(complete), stage.rollout.groups_per_chunk
                for first in range(0, len(left), size):
                    writer.append(before.read(left[first : first + size]))
        cut, total = self._cut(), len(self.candidates) - len(complete)
        missing = [group for group in RolloutStore(stage.rollouts).missing(self.candidates) if group not in cut]
        if there := total - len(missing):
            stage.log_event("resume", phase="rollout", skipped=there, total=total, unit="groups")
        return {"continued": continued, "missing": missing}

    def _cut(self) -> set[int]:
        """The groups with a response that reached the budget in this stage, unfinished."""
        return set(RolloutStore(self.stage.unfinished).group_ids)

    def _writer(self, directory: Path) -> RolloutWriter:
        weights_hash = self.worker.weights_hash
        return RolloutWriter(directory, weights_hash=weights_hash, logprob_mode="processed", writer=self.replicas.rank)

    def _generate(
        self, name: str, parts: Sequence[Sequence[int]], ids: list[int], before: Path | None, budget: float
    ) -> None:
        """Generate the groups of ``parts`` of which ``ids`` are missing, together with all replicas.

        name: key of this pass in the shared store. before: the store with unfinished groups, which are continued; None
        if there are none. budget: largest number of tokens to add to each response.
        """
        worker, store, missing = self.worker, RolloutStore(before) if before else None, set(ids)
        whole, size = worker.engine.repeats_chunks, self.stage.rollout.groups_per_chunk
        chunks = [chunk for part in parts for chunk in missing_chunks(part, missing, whole, size)]

        def earlier(group: int) -> tuple[Response, ...]:
            return store.read([group])[0].responses if store and not store.missing([group]) else ()

        with self._writer(self.stage.rollouts) as complete, self._writer(self.stage.unfinished) as cut:
            for groups in worker.generate(
                shared_chunks(self.replicas, name, chunks, worker.stopped),
                worker.prompts.train,
                worker.sampling(budget=budget),
                earlier=earlier,
                watch=self.stats.step,
            ):
                wanted = [group for group in groups if group.group_id in missing]
                complete.append([group for group in wanted if not any_unfinished(group.responses)])
                cut.append([group for group in wanted if any_unfinished(group.responses)])
        _end(self.replicas, worker, self.stats, f"generated/{name}")

    def _needed(self) -> dict[str, list[int]]:
        """Rank 0: the groups to generate beyond the budget, and which of them are ``missing``, not complete yet."""
        cut = self._cut()
        lack = self.stage.run.recipe.groups_per_stage - (len(self.candidates) - len(cut))
        groups = sorted(cut)[: max(0, lack)]
        return {"groups": groups, "missing": RolloutStore(self.stage.rollouts).missing(groups)}

    def _seal(self) -> None:
        stage, wanted = self.stage, self.stage.run.recipe.groups_per_stage
        complete = RolloutStore(stage.rollouts).group_ids
        chosen, cut = complete[:wanted], self._cut()
        carried = sorted(set(self.candidates).difference(chosen))
        stage.log_event(
            "partial_rollouts",
            phase="rollout",
            candidates=len(self.candidates),
            complete=len(complete) - len(cut.intersection(complete)),
            finished=len(cut.intersection(complete)),
            chosen=len(chosen),
            carried=len(carried),
        )
        seal(stage.unfinished, self.candidates, sorted(cut.difference(complete)))
        seal(stage.rollouts, self.candidates, chosen, carried)
