"""The rollout workers of a live stage: engines generate while trainers train.

The schedule (`megarl.recipe.schedule`) decides which policy version may generate which groups.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from megarl.distributed import ReplicaGroup, Role
from megarl.errors import STOPPED, UserError
from megarl.heartbeats import WAITS, beat
from megarl.phases.candidates import Candidates
from megarl.phases.generation import RolloutStats, missing_chunks
from megarl.phases.live.state import LiveState
from megarl.phases.rollout_worker import RolloutWorker, with_policy
from megarl.phases.stop import StopRequest
from megarl.rollout.engine import visible_gpus
from megarl.storage.files import appears, make_directory
from megarl.storage.rollouts import RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

POLL_SECONDS = 0.02
STORE_SECONDS = 0.2  # between two shards; short, because trainers may be waiting for the groups


def serve(stage: Stage, role: Role) -> None:
    """Run a rollout worker: generate the missing groups of the stage, then seal its store."""
    stop = StopRequest()
    replicas = ReplicaGroup.join(role, stop.exit_if_asked)
    state = LiveState(replicas.store, replicas.world)
    if not replicas.from_first("is sealed", stage.is_sealed()):
        make_directory(stage.rollouts)
        choices, found = open_choices(stage, replicas), None
        if replicas.rank == 0:
            store = RolloutStore(stage.rollouts, one_policy=False)
            for choice in choices:
                choice.publish_stored(store)
            found = [group for choice in choices for group in choice.missing(store)]
        if missing := replicas.from_first("missing", found):
            leave_trainers_devices(stage)
            LiveRolloutWorker(stage, replicas, state, stop, choices).work(missing)
        if stop.asked:
            sys.exit(STOPPED)
        replicas.barrier("generated")
        if replicas.rank == 0:
            seal(stage.rollouts, stage.groups, _chosen(stage, choices), one_policy=False)
    state.leave(replicas.rank)


def open_choices(stage: Stage, replicas: ReplicaGroup) -> list[Candidates]:
    """The candidates of each policy version that generates groups of the stage."""
    recipe, groups = stage.run.recipe, stage.groups
    size, wanted = recipe.candidates_per_choice, recipe.groups_per_choice
    parts = [groups[start : start + size] for start in range(0, len(groups), size)]
    return [Candidates(replicas, part, min(wanted, len(part))) for part in parts]


def _chosen(stage: Stage, choices: list[Candidates]) -> list[int] | None:
    """The groups that the stage trains; None: all."""
    chosen = [group for choice in choices for group in choice.chosen() or ()]
    if chosen:
        counts = [choice.summary() for choice in choices]
        stage.log_event("dynamic_sampling", phase="live", **{k: sum(one[k] for one in counts) for k in counts[0]})
    return chosen or None


def leave_trainers_devices(stage: Stage) -> None:
    """Hide the trainers' GPUs from this process, which then sees only those of the rollout workers."""
    recipe, table = stage.run.recipe, stage.rollout
    trainers = recipe.actor.processes_per_node
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) - trainers)
    if recipe.actor.backend == "cuda" and not recipe.schedule.colocate:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(trainers, table.workers * table.tensor_parallel)


class LiveRolloutWorker:
    """One engine replica: loads the policy version that the next chunk needs and generates what it may generate."""

    def __init__(
        self, stage: Stage, replicas: ReplicaGroup, state: LiveState, stop: StopRequest, choices: list[Candidates]
    ) -> None:
        self.stage, self.replicas, self.state, self.stop, self.choices = stage, replicas, state, stop, choices
        self.schedule = stage.run.recipe.schedule
        self.rule = self.schedule.lag_rule
        self.seconds = dict.fromkeys(("idle_seconds", "load_seconds", "generate_seconds"), 0.0)  # so far
        self.start = time.perf_counter()
        self.worker: RolloutWorker | None = None
        self.loaded = -1  # the version that the engine has; -1: none
        self.todo: list[Sequence[int]] = []  # all chunks of the stage, the same on all replicas
        self.next: Sequence[int] | None = None  # the chunk that this replica has taken, but not begun

    def work(self, missing: list[int]) -> None:
        """Generate the ``missing`` groups together with the other replicas; returns early if asked to stop."""
        if (version := self._wait(lambda: self._version(missing[:1]))) is None:
            return
        worker = self._load(version)
        self.todo = self._chunks(missing, worker.engine.repeats_chunks)
        directory, rank = self.stage.rollouts, self.replicas.rank
        stats = RolloutStats(self.stage, rank, worker, lambda group: self._choice([group.group_id]).add(group))
        with RolloutWriter(directory, weights_hash=None, logprob_mode="processed", writer=rank) as writer:
            self._take()
            while (self.next or worker.unfinished) and (version := self._wait(self._next_version)) is not None:
                self._load(version)
                start = time.perf_counter()
                for groups in worker.generate(
                    self._take_now,
                    worker.prompts.train,
                    worker.sampling(),
                    interrupted=lambda: self._newest() != self.loaded if self.schedule.partial else False,
                    within_chunks=self.schedule.partial,
                    # else the speed of scoring would affect which candidates are generated
                    scored_first=worker.engine.repeats_chunks and self.choices[0].chooses,
                    store_seconds=STORE_SECONDS,
                    watch=stats.step,
                ):
                    writer.append(groups, worker.weights_hash)
                self.seconds["generate_seconds"] += time.perf_counter() - start
        stats.log()
        worker.close()
        if not self.stop.asked:  # else the next attempt generates what is missing, and needs the versions for it
            # before waiting for the other replicas, which may need the trainers to go on
            self.state.leave(self.replicas.rank)
            self._log_idle()

    def _chunks(self, missing: list[int], whole: bool) -> list[Sequence[int]]:
        present = set(self.stage.groups).difference(missing)
        if self.replicas.rank == 0 and present:
            total = len(self.stage.groups)
            self.stage.log_event("resume", phase="live", skipped=len(present), total=total, unit="groups")
        schedule, size = self.schedule, self.stage.rollout.groups_per_chunk
        interval = self.stage.run.recipe.candidates_per_choice
        # a choice needs one version for all its candidates
        first = 0 if self.choices[0].chooses else self.rule.before_first_cut * schedule.prompts_per_update
        chunks = missing_chunks(self.stage.groups, set(missing), whole, size, interval, first)
        # groups with continued responses are stored one by one, so some groups of a chunk may be stored already
        return [[group for group in chunk if group not in present] for chunk in chunks]

    def _take(self) -> None:
        """Reserve the next chunk of which a group can still be chosen for this replica."""
        self.next = None
        while self.next is None and (number := self.state.take()) < len(self.todo):
            self.next = self.todo[number] if self._choice(self.todo[number]).may_be_chosen(self.todo[number]) else None

    def _choice(self, chunk: Sequence[int]) -> Candidates:
        return self.choices[(chunk[0] - self.stage.groups.start) // self.stage.run.recipe.candidates_per_choice]

    def _version(self, chunk: Sequence[int]) -> int | None:
        """The version to generate a chunk with, by the last batch that may have its last group; None while it is not
        published."""
        newest = self._newest()
        update = self.stage.run.recipe.updates_of_group(chunk[-1])[-1]
        return None if newest is None else self.rule.version(update, newest)

    def _newest(self) -> int | None:
        if self.schedule.colocate and not self.state.turns_begun():
            return None
        return self.state.newest()

    def _next_version(self) -> int | None:
        """The version to generate with next; unfinished responses are continued with the newest one."""
        assert self.worker is not None
        if self.worker.unfinished:
            return self._newest()
        assert self.next is not None
        return self._version(self.next)

    def _take_now(self) -> Sequence[int] | None:
        """The next chunk, if the loaded version is the right one for it."""
        if self.next and not self._choice(self.next).may_be_chosen(self.next):
            self._take()
        if not self.next or self.stop.asked or self._version(self.next) != self.loaded:
            return None
        chunk = self.next
        self._take()
        return chunk

    def _wait(self, version: Callable[[], int | None]) -> int | None:
        """Wait until ``version`` returns one; None if asked to stop. On shared devices trainers use them meanwhile."""
        start = time.perf_counter()
        while (found := version()) is None and not self.stop.asked:
            beat(WAITS, "wait for the next version of the policy")
            if self.schedule.colocate and self._newest() is not None:
                self._rest()
            else:
                time.sleep(POLL_SECONDS)
        self.seconds["idle_seconds"] += time.perf_counter() - start
        return None if self.stop.asked else found

    def _rest(self) -> None:
        """Leave the shared devices to the trainers until these have nothing left to train."""
        number = self.state.round()
        if self.worker is not None:
            self.worker.engine.sleep()
            self.loaded = -1
        self.state.rest(self.replicas.rank, number)
        while self.state.round() == number and not self.stop.asked:
            beat(WAITS, "sleep while trainers use the devices")
            time.sleep(POLL_SECONDS)

    def _load(self, version: int) -> RolloutWorker:
        """Load ``version`` into the engine and check it, unless the engine has it; returns the worker."""
        start, path = time.perf_counter(), self.stage.run.version(version)
        if self.worker is not None and version == self.loaded:
            return self.worker
        self.state.announce(self.replicas.rank, version)
        if not appears(path):
            raise UserError(
                f"{path}, the policy that must generate the next groups, does not exist: either updates have trained "
                "these groups, and it was removed, or the nodes do not share the run directory"
            )
        place = {"phase": "live", "version": version}
        self.worker = with_policy(self.worker, self.stage, path, self.replicas, place)
        self.worker.stopped = lambda: self.stop.asked
        self.loaded = version
        self.seconds["load_seconds"] += time.perf_counter() - start
        return self.worker

    def _log_idle(self) -> None:
        """Log an `idle` event: how long all engines together waited for versions, loaded and generated."""
        seconds = time.perf_counter() - self.start
        everyone = self.replicas.gather("idle", self.seconds | {"seconds": seconds})
        if self.replicas.rank == 0:
            total = {name: round(sum(one[name] for one in everyone), 3) for name in everyone[0]}
            ratio = round(total["idle_seconds"] / total["seconds"], 4)
            self.stage.log_event("idle", role="rollout", **total, ratio=ratio)
