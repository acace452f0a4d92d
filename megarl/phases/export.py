"""The export phase: writes the policy, or the adapters, of a checkpoint as Hugging Face files; makes no update.

It has a single process, which holds the whole model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.actor import checkpoint, hf, parallel, peft
from megarl.actor.optimizer import gather_parameters
from megarl.actor.step import Actor
from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.storage.checkpoints import checkpoints
from megarl.storage.policies import PolicyInfo, check_policy
from megarl.storage.run_dir import Stage


def export(stage: Stage) -> None:
    """Write the policy after the request's ``update`` updates of the stage to its ``output`` directory."""
    request = stage.run.read_request()
    device = parallel.initialize(stage.run.recipe)
    actor = Actor.build(stage.run.recipe, stage.run.base, device, load=False)
    load_policy(actor, stage, request["update"])
    place = stage, request["update"], Path(request["output"])
    if request["adapters"]:
        write_adapters(actor, *place)
    else:
        write_policy(actor, *place)
    stage.run.write_answer([])


def load_policy(actor: Actor, stage: Stage, updates: int) -> None:
    """Load the policy after ``updates`` updates of the stage into the actor; `UserError` if its files are damaged."""
    path = dict(checkpoints(stage.checkpoints)).get(updates)
    if updates and path is not None:
        beat("load", path.name)
        if damage := checkpoint.verify(path):
            raise UserError(f"{path} is damaged: {damage}")
        checkpoint.load(actor, path)
    else:  # the stage's first policy, or its last one if its checkpoints are gone; new adapters do not change either
        policy = stage.next.policy if updates else stage.policy
        check_policy(policy, "Restore it from a copy")
        hf.load_hf(actor.models, policy)
    gather_parameters(actor.replicas)


def write_policy(actor: Actor, stage: Stage, updates: int, target: Path) -> PolicyInfo:
    """Export the actor's policy, that after ``updates`` updates of the stage, to the directory ``target``."""
    beat("export", target.name)
    shutil.rmtree(target, ignore_errors=True)
    return hf.export_hf(actor.models, target, stage.run.base, stage.first_update + updates)


def write_adapters(actor: Actor, stage: Stage, updates: int, target: Path) -> None:
    """Export the actor's adapters, those after ``updates`` updates of the stage, to the directory ``target``."""
    beat("export", target.name)
    table, version = actor.recipe.actor.lora, stage.first_update + updates
    assert table is not None
    peft.export_adapters(actor.models, target, table, actor.recipe.model.path, actor.base, version)
