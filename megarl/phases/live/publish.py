"""The versions of a policy that a live trainer publishes, and how long they are kept."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarl.phases.live.state import NO_VERSION, LiveState
from megarl.storage.run_dir import Stage

if TYPE_CHECKING:
    from megarl.phases.exports import Exporter


@dataclass(frozen=True)
class Publisher:
    """Exports every ``sync_every`` updates. Only rank 0 of the trainers publishes and removes old versions."""

    stage: Stage
    state: LiveState

    def continue_after(self, done: int) -> None:
        """An earlier attempt saved so many updates of the stage. Versions that it published after later updates will be
        made again, perhaps otherwise, and are removed."""
        if dist.get_rank():
            return
        for leftover in self.stage.run.root.glob("stages/*/policies/.*.tmp"):
            shutil.rmtree(leftover)
        # a version after exactly `done` updates, if due, is published again once the actor is there
        run, saved = self.stage.run, self.stage.first_update + done
        versions = run.versions()
        for version in (v for v in versions if v >= saved):
            _remove(run.version(version))
        self.state.publish(max([self.stage.first_update, *(v for v in versions if v < saved)]))

    def trained(self, exporter: Exporter, updates: int) -> None:
        """So many updates of the stage are made; publish if a version is due. Collective."""
        run, version = self.stage.run, self.stage.first_update + updates
        schedule = run.recipe.schedule
        # the stage's first version is its policy, its last one the next stage's
        if not schedule.lag_rule.is_published(version) or updates in (0, schedule.updates_per_stage):
            return
        exporter.export(version, run.version(version))
        if dist.get_rank() == 0:
            self.state.publish(version)
            self._retire(min(self.state.oldest_in_use(), self._needed_later()))

    def end_stage(self) -> None:
        """Keep what engines of the next stage may need, and nothing after the last one."""
        if dist.get_rank() == 0:
            self._retire(self._needed_later())

    def _needed_later(self) -> int:
        """The oldest version that engines of later stages may load."""
        schedule, following = self.stage.run.recipe.schedule, self.stage.next.first_update
        if following == schedule.total_updates:
            return NO_VERSION
        return following if schedule.lag_rule.delay is None else schedule.lag_rule.exact(following)

    def _retire(self, oldest: int) -> None:
        """Remove what is older than ``oldest``."""
        run = self.stage.run
        for version in (v for v in run.versions() if v < oldest):
            _remove(run.version(version))


def _remove(policy: Path) -> None:
    hidden = policy.with_name(f".{policy.name}.tmp")  # so that a kill leaves no half of it under its name
    policy.rename(hidden)
    shutil.rmtree(hidden)
