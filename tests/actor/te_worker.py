"""Trains the same models with Transformer Engine's layers and with the torch modules, and prints results as JSON.

Run as ``python -m tests.actor.te_worker FOLDER FAMILY...``, with the folder `stand_ins` on PYTHONPATH: it has stand-ins
for Transformer Engine's classes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.actor.conftest import make_hf_model, make_recipe
from tests.actor.test_step import make_samples

KINDS = ("torch", "transformer_engine")


def main(folder: Path, families: list[str]) -> None:
    from megarl.actor import parallel
    from megarl.distributed import become_single_process

    become_single_process()
    device = parallel.initialize(make_recipe())
    print(json.dumps({family: compared(family, folder / family, device) for family in families}))
    torch.distributed.destroy_process_group()


def compared(family: str, folder: Path, device: torch.device) -> dict[str, Any]:
    from megarl.actor import checkpoint, packing
    from megarl.actor.hf import export_hf
    from megarl.actor.step import Actor, train_step
    from megarl.objectives import build_objective

    make_hf_model(family).save_pretrained(folder / "model")
    recipes = {kind: make_recipe(folder / "model", actor={"layers": kind}) for kind in KINDS}
    objective = build_objective("mu_grpo", {})

    def update(actor: Actor) -> float:
        return train_step(actor, packing.micro_batches(make_samples(), 24, device), objective, 1e-2)["loss"]

    actors = {kind: Actor.build(recipes[kind], folder / "model", device) for kind in KINDS}
    names = [name for name, _ in actors["transformer_engine"].models[0].named_parameters()]
    export_hf(actors["transformer_engine"].models, folder / "exported", folder / "model", 0)
    losses = {kind: [update(actor) for _ in range(2)] for kind, actor in actors.items()}
    for kind, actor in actors.items():
        checkpoint.save(actor, folder / kind, 2, keep=1)
        losses[kind].append(update(actor))
    resumed = {}
    for source in KINDS:
        for target in KINDS:
            actor = Actor.build(recipes[target], folder / "model", device, load=False)
            ((_, path),) = checkpoint.checkpoints(folder / source)
            checkpoint.load(actor, path)
            resumed[f"{source} -> {target}"] = update(actor)
    return {"names": names, "losses": losses, "resumed": resumed}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
