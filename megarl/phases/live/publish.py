"""The versions of a policy that a live trainer publishes, and how long they are kept."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarl.phases.live.state import NOTHING, LiveState
from megarl.phases.optimize import export
from megarl.storage.run_dir import RunDir

if TYPE_CHECKING:
    from megarl.actor.step import Actor


@dataclass(frozen=True)
class Publisher:
    """Exports every ``sync_every`` updates. Only rank 0 of the trainers writes to the state and removes what is old."""

    run: RunDir
    stage: int
    state: LiveState

    @property
    def before(self) -> int:
        """Updates of earlier stages."""
        return self.stage * self.run.recipe.schedule.updates_per_stage

    def continue_after(self, done: int) -> None:
        """So many updates of the stage are saved, by an earlier attempt: what it published later is a lost branch."""
        if dist.get_rank():
            return
        for leftover in self.run.root.glob("stages/???/policies/.*.tmp"):
            shutil.rmtree(leftover)
        # the one after `done` updates, if due, is published again once the actor is there
        versions = self.run.versions()
        for version in (v for v in versions if v >= self.before + done):
            _remove(self.run.version(version))
        self.state.publish(max([self.before, *(v for v in versions if v < self.before + done)]))

    def trained(self, actor: Actor, updates: int) -> None:
        """So many updates of the stage are made; publish if a version is due. Collective."""
        schedule, version = self.run.recipe.schedule, self.before + updates
        # the stage's first version is its policy, its last one the next stage's
        if not schedule.lag_rule.is_published(version) or updates in (0, schedule.updates_per_stage):
            return
        export(actor, self.run, version, self.run.version(version))
        if dist.get_rank() == 0:
            self.state.publish(version)
            self._retire(min(self.state.oldest_in_use(), self._needed_later()))

    def end_stage(self) -> None:
        """Keep what engines of the next stage may need, and nothing after the last one."""
        if dist.get_rank() == 0:
            self._retire(self._needed_later())

    def _needed_later(self) -> int:
        """The oldest version that engines of later stages may load."""
        schedule, following = self.run.recipe.schedule, self.before + self.run.recipe.schedule.updates_per_stage
        if following == schedule.total_updates:
            return NOTHING
        return following if schedule.lag_rule.delay is None else schedule.lag_rule.exact(following)

    def _retire(self, oldest: int) -> None:
        """Remove what is older than ``oldest``."""
        for version in (v for v in self.run.versions() if v < oldest):
            _remove(self.run.version(version))


def _remove(policy: Path) -> None:
    hidden = policy.with_name(f".{policy.name}.tmp")  # so that a kill leaves no half of it under its name
    policy.rename(hidden)
    shutil.rmtree(hidden)
