"""The export phase: the policy, or the adapters, that a checkpoint holds, in files of Hugging Face. No update.

One process, which has all of the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.actor import checkpoint, hf, parallel, peft
from megarl.actor.optimizer import gather_parameters
from megarl.actor.step import Actor
from megarl.beats import beat
from megarl.errors import UserError
from megarl.storage.checkpoints import checkpoints
from megarl.storage.policies import PolicyInfo, check_policy
from megarl.storage.requests import read_request, write_answer
from megarl.storage.run_dir import Stage


def export(stage: Stage) -> None:
    """Make ``output`` of the request the policy after ``update`` updates of the stage."""
    request = read_request(stage.run.root)
    device = parallel.initialize(stage.run.recipe)
    actor = Actor.build(stage.run.recipe, stage.run.base, device, load=False)
    load_policy(actor, stage, request["update"])
    place = stage, request["update"], Path(request["output"])
    if request["adapters"]:
        write_adapters(actor, *place)
    else:
        write_policy(actor, *place)
    write_answer(stage.run.root, [])


def load_policy(actor: Actor, stage: Stage, updates: int) -> None:
    """Give the actor the policy after so many updates of the stage; `UserError` where its files are damaged."""
    path = dict(checkpoints(stage.checkpoints)).get(updates)
    if updates and path is not None:
        beat("load", path.name)
        if damage := checkpoint.verify(path):
            raise UserError(f"{path} is damaged: {damage}")
        checkpoint.load(actor, path)
    else:  # the beginning of the stage, or its end, whose checkpoints are gone; new adapters add nothing to it
        policy = stage.next.policy if updates else stage.policy
        check_policy(policy, "Restore it from a copy")
        hf.load_hf(actor.models, policy)
    gather_parameters(actor.replicas)


def write_policy(actor: Actor, stage: Stage, updates: int, target: Path) -> PolicyInfo:
    """Export the actor's policy, which is that after so many updates of the stage."""
    beat("export", target.name)
    shutil.rmtree(target, ignore_errors=True)
    return hf.export_hf(actor.models, target, stage.run.base, stage.first_update + updates)


def write_adapters(actor: Actor, stage: Stage, updates: int, target: Path) -> None:
    """Export the actor's adapters, which are those after so many updates of the stage."""
    beat("export", target.name)
    table, version = actor.recipe.actor.lora, stage.first_update + updates
    assert table is not None
    peft.export_adapters(actor.models, target, table, actor.recipe.model.path, actor.base, version)
