"""Tokens sent to their experts by Megatron-Core's flex dispatcher with DeepEP, for which there is a stand-in."""

import pytest
import torch

from megarl.objectives import build_objective
from tests.actor.layout_ranks import LAYOUTS, join, recipe_of, update_samples, whole_gradient
from tests.actor.ranks import run_ranks

NAMES = ("EP2", "TP2 ETP2")
UPDATES = 2


def worker(rank, model, rollouts, folder):
    """Updates of every layout with both dispatchers: {(layout, dispatcher): (gradient, losses)}."""
    from megatron.core import parallel_state as mpu

    from megarl.actor import packing, parallel, step

    join(rank, 2, folder)
    objective, results = build_objective("mu_grpo", {}), {}
    for name in NAMES:
        parallel.build_groups(recipe_of(LAYOUTS[name], model))
        for dispatcher in ("alltoall", "flex"):
            recipe = recipe_of(
                LAYOUTS[name], model, actor={"recompute": "full"}, megatron={"moe_token_dispatcher_type": dispatcher}
            )
            actor = step.Actor.build(recipe, model, torch.device("cpu"))

            def batches(update, actor=actor):
                return packing.micro_batches(update_samples(rollouts, update), 128, actor.device, share=True)

            step.compute_gradients(actor, batches(0), objective)
            gradient = whole_gradient(actor, model, folder / "gradient")
            losses = [step.train_step(actor, batches(u), objective, lr=1e-3)["loss"] for u in range(UPDATES)]
            kind = type(actor.models[0].decoder.layers[0].mlp.token_dispatcher).__name__
            results[name, dispatcher] = kind, gradient, losses
        mpu.destroy_model_parallel()
    if rank == 0:
        torch.save(results, folder / "results.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.layouts
def test_updates_equal_those_of_the_usual_dispatcher(model_and_rollouts, tmp_path):
    run_ranks(worker, (*model_and_rollouts, tmp_path), 2)
    results = torch.load(tmp_path / "results.pt")
    for name in NAMES:
        (usual, gradient, losses), (flex, other, others) = results[name, "alltoall"], results[name, "flex"]
        assert (usual, flex) == ("IndexDispatcher", "MoEFlexTokenDispatcher")
        size = sum(float(g.square().sum()) for g in gradient.values())
        difference = sum(float((other[key] - g).square().sum()) for key, g in gradient.items())
        print(f"\n{name}: gradient {(difference / size) ** 0.5:.1e}, losses {losses} {others}")
        assert size > 1e-6 and difference < 1e-12 * size
        assert others == pytest.approx(losses, rel=1e-5)
