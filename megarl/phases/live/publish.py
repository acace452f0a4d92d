"""Exports the policy versions that rollout workers of a live stage load, and removes those no longer needed."""

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
            self._retire(min(self.state.oldest_in_use(), self.stage.next.oldest_needed))

    def end_stage(self) -> None:
        """Remove the versions that engines of the next stage do not need; after the last stage, all of them."""
        if dist.get_rank() == 0:
            self._retire(self.stage.next.oldest_needed)

    def _retire(self, oldest: int) -> None:
        """Remove the versions older than ``oldest``, except those that have not been evaluated yet."""
        run = self.stage.run
        for version in (v for v in run.versions() if v < oldest and not run.lacks_evaluation(v)):
            run.remove_version(version)
