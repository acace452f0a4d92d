"""The versions of a policy that a live trainer publishes, and how long they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarl.phases.live.state import LiveState
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
        # a version after exactly `done` updates, if due, is published again once the actor is there
        versions = self.stage.run.remove_versions_after(self.stage.first_update + done)
        self.state.publish(max([self.stage.first_update, *versions]))

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
            self._retire(min(self.state.oldest_in_use(), self.stage.next.oldest_needed))

    def end_stage(self) -> None:
        """Keep what engines of the next stage may need, and nothing after the last one."""
        if dist.get_rank() == 0:
            self._retire(self.stage.next.oldest_needed)

    def _retire(self, oldest: int) -> None:
        """Remove what is older than ``oldest``, unless it waits for its evaluation."""
        run = self.stage.run
        for version in (v for v in run.versions() if v < oldest and not run.lacks_evaluation(v)):
            run.remove_version(version)
