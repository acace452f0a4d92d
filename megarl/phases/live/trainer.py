"""The live phase: trainers and rollout workers run at the same time; engines get new weights every few updates."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.actor import parallel
from megarl.distributed import Role
from megarl.heartbeats import WAITS, beat
from megarl.phases.candidates import Choice, add_stored
from megarl.phases.export import Exporter
from megarl.phases.live.service import serve
from megarl.phases.live.state import NO_VERSION, Decision, LiveState
from megarl.phases.stop import StopRequest
from megarl.phases.updates import build_actor, find_start, make_updates
from megarl.storage.files import make_directory
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import Stage

if TYPE_CHECKING:
    from megarl.actor.step import Actor

POLL_SECONDS = 0.02


def live(stage: Stage) -> None:
    """Run this process's role in ``stage``: a trainer makes its updates, a rollout worker generates its rollouts."""
    role, workers = find_role(stage)
    if role.name == "trainer":
        train(stage, role, workers)
    else:
        serve(stage, role)


def find_role(stage: Stage) -> tuple[Role, int]:
    """This process's role, and the number of rollout workers. On each node the first processes are the trainers."""
    local, node, nodes = (int(os.environ[name]) for name in ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"))
    trainers, workers = stage.run.recipe.actor.processes_per_node, stage.rollout.workers
    if local < trainers:
        return Role("trainer", node * trainers + local, nodes * trainers), nodes * workers
    return Role("worker", node * workers + local - trainers, nodes * workers), nodes * workers


def train(stage: Stage, role: Role, workers: int) -> None:
    """Run a trainer: make the updates of the stage, each as soon as its groups are stored. workers: their number."""
    stop = StopRequest()
    device, store = parallel.join(stage.run.recipe, role)
    state = LiveState(store, workers)
    publisher = Publisher(stage, state)
    if stage.is_trained():  # an earlier attempt made all updates, but died before its exit
        publisher.continue_after(stage.run.recipe.schedule.updates_per_stage)
        state.begin_turns()
    else:
        start = find_start(stage, "live")
        publisher.continue_after(start.done)
        actor = build_actor(stage, device, start)
        exporter = Exporter(actor, stage)
        publisher.trained(exporter, start.done)
        release(device)
        dist.barrier()
        batches = LiveBatches(actor, publisher, exporter, stop)
        if role.rank == 0:
            state.begin_turns()
        make_updates(actor, stage, start, batches, stop, exporter)
        batches.log_idle()
    publisher.end_stage(stop)


def release(device: torch.device) -> None:
    """Give the memory that torch's allocator holds in reserve back to the device, for engines that share it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Publisher:
    """Exports the policy every ``sync_every`` updates. Rank 0 of the trainers publishes and removes the versions."""

    stage: Stage
    state: LiveState

    def continue_after(self, done: int) -> None:
        """Resume after ``done`` updates of the stage: remove later versions and publish the newest one that is left.

        Later versions come from updates of an earlier attempt that are made again, perhaps with other results.
        """
        if dist.get_rank():
            return
        # if a version is due after exactly `done` updates, `trained` publishes it once the actor is loaded
        versions = self.stage.run.remove_versions_after(self.stage.first_update + done)
        self.state.publish(max([self.stage.first_update, *versions]))

    def trained(self, exporter: Exporter, updates: int) -> None:
        """Publish a version if one is due after ``updates`` updates of the stage. Collective."""
        run, version = self.stage.run, self.stage.first_update + updates
        schedule = run.recipe.schedule
        # the stage's first version exists as its policy, and its last one is exported as the next stage's policy
        if not schedule.lag_rule.is_published(version) or updates in (0, schedule.updates_per_stage):
            return
        exporter.export(version, run.version(version))
        if dist.get_rank() == 0:
            self.state.publish(version)
            run.remove_versions_before(min(self.state.oldest_in_use(), self.stage.next.oldest_needed))

    def end_stage(self, stop: StopRequest) -> None:
        """Remove the versions that engines of the next stage do not need; after the last stage, all of them.

        Engines of this stage may still start, or load a version for a chunk that is no longer needed.
        """
        while self.state.oldest_in_use() < NO_VERSION:
            stop.exit_if_asked()
            beat(WAITS, "wait until all engines have left the stage")
            time.sleep(POLL_SECONDS)
        if dist.get_rank() == 0:
            self.stage.run.remove_versions_before(self.stage.next.oldest_needed)


class LiveBatches:
    """The groups of a stage as engines store them; implements `megarl.phases.updates.Batches`."""

    def __init__(self, actor: Actor, publisher: Publisher, exporter: Exporter, stop: StopRequest) -> None:
        self.actor, self.publisher, self.exporter, self.stop = actor, publisher, exporter, stop
        self.stage, self.state = publisher.stage, publisher.state
        self.schedule = self.stage.run.recipe.schedule
        make_directory(self.stage.rollouts)
        self.store = RolloutStore(self.stage.rollouts, one_policy=False)
        self.chosen: list[int] = []  # with rollout.oversample: the groups to train, of the first versions of the stage
        self.choice: Choice | None = None  # among the candidates of the next one
        self.idle_seconds = 0.0
        self.start = time.perf_counter()

    def read(self, update: int) -> list[Group] | None:
        """Wait until the groups of an update are stored and return them; None if asked to stop. Collective."""
        start = time.perf_counter()
        decision, given = self._decision(update), False
        while decision != "train" or self._missing(update):  # what another node stored becomes visible late
            if decision == "stop":
                return None
            if self.stop.asked:
                self.state.ask_stop()
            if decision == "wait" and self.schedule.colocate and not given:
                release(self.actor.device)
                self.state.give(update)
                given = True
            beat(WAITS, f"wait for the groups of update {self.stage.first_update + update + 1}")
            time.sleep(POLL_SECONDS)
            decision = self._decision(update)
        beat("update", f"update {self.stage.first_update + update + 1}")
        groups = self.store.read(self._groups(update))
        self.idle_seconds += time.perf_counter() - start
        return groups

    def _groups(self, update: int) -> Sequence[int]:
        """The ids of the groups of an update, as of the last refresh of the store; none as long as they are not chosen.

        The choice depends only on the candidates (`megarl.phases.candidates`), so all ranks and attempts make the same.
        """
        recipe, stage = self.stage.run.recipe, self.stage
        if recipe.rollout.oversample == 1:
            return stage.groups_of_update(stage.groups, update)
        while not (groups := stage.groups_of_update(self.chosen, update)):
            wanted, size = recipe.groups_per_choice, recipe.candidates_per_choice
            begin = len(self.chosen) // wanted * size
            self.choice = self.choice or Choice(stage.groups[begin : begin + size], wanted)
            add_stored(self.choice, self.store)
            if not self.choice.is_final:
                break
            self.chosen += self.choice.chosen()
            self.choice = None
        return groups

    def _missing(self, update: int) -> bool:
        """Whether this rank does not see all groups of an update yet."""
        self.store.refresh()
        wanted = self._groups(update)
        return not wanted or bool(self.store.missing(wanted))

    def _decision(self, update: int) -> Decision | None:
        """What all trainers do next: train an update, wait for its groups, or stop. The first one decides.

        On shared devices trainers and engines take turns. The engines' turn begins once no stored groups are left to
        train and all trainers have given back the memory that they can do without.
        """
        decided = self.state.decision(update)
        if dist.get_rank() or decided == "train":
            return decided
        missing, rest = self._missing(update), not self.schedule.colocate or self.state.all_rest()
        decision: Decision = "wait" if missing or not rest else "train"
        if self.stop.asked or self.state.stop_asked():
            decision = "stop"
        if decision != decided:
            self.state.decide(update, decision)
        if decision == "wait" and self.schedule.colocate and rest and self.state.given(update) == dist.get_world_size():
            self.state.next_round()
        return decision

    def trained(self, updates: int) -> None:
        self.publisher.trained(self.exporter, updates)

    def log_idle(self) -> None:
        """Log an `idle` event: for how long the trainers waited for and read rollouts (Table 2 of mu-GRPO)."""
        if parallel.reports_metrics():
            seconds = time.perf_counter() - self.start
            ratio = round(self.idle_seconds / seconds, 4)
            idle = round(self.idle_seconds, 3)
            self.stage.log_event("idle", role="trainer", idle_seconds=idle, seconds=round(seconds, 3), ratio=ratio)
