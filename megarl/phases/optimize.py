"""The optimize phase: makes all updates of a stage on its sealed rollouts, with Megatron; no engine runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megarl.actor import parallel
from megarl.distributed import ReplicaGroup
from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.phases.export import Exporter
from megarl.phases.stop import StopRequest
from megarl.phases.updates import build_actor, find_start, make_updates
from megarl.storage.files import appears
from megarl.storage.ledger import SEALED
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import Stage


def optimize(stage: Stage) -> None:
    """Turn ``stage.policy`` into ``stage.next.policy``, continuing from the newest undamaged checkpoint."""
    stop = StopRequest()
    if ReplicaGroup.join(while_waiting=stop.exit_if_asked).from_first("is trained", stage.is_trained()):
        return  # restarted after a process died between the export and its exit
    if not appears(stage.rollouts / SEALED):
        command = f"megarl rollout {quoted(stage.run.root)} --stage {stage.number}"
        raise UserError(f"{stage.rollouts} is not sealed: run `{command}` first")
    device = parallel.initialize(stage.run.recipe)
    start, store = find_start(stage, "optimize"), RolloutStore(stage.rollouts)
    actor = build_actor(stage, device, start)
    exporter = Exporter(actor, stage)
    batches = SealedBatches(stage, store, exporter)
    if dist.get_rank() == 0:
        stage.run.remove_versions_after(stage.first_update + start.done)
    dist.barrier()
    if start.done:
        batches.trained(start.done)
    make_updates(actor, stage, start, batches, stop, exporter)


@dataclass(frozen=True)
class SealedBatches:
    """The groups of a stage from its sealed rollouts; implements `megarl.phases.updates.Batches`."""

    stage: Stage
    store: RolloutStore
    exporter: Exporter

    def read(self, update: int) -> list[Group]:
        return self.store.read(self.stage.groups_of_update(self.store.chosen, update))

    def trained(self, updates: int) -> None:
        """Export the policy if it is due for evaluation, which engines on the same devices make after the stage."""
        run, version = self.stage.run, self.stage.first_update + updates
        if updates < run.recipe.schedule.updates_per_stage and run.recipe.is_evaluated(version):
            self.exporter.export(version, run.version(version))
