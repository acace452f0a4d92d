"""What one rank of `test_lora_layouts` computes: updates of adapters in each layout, all from one checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.objectives import build_objective
from tests.actor.layout_ranks import LAYOUTS, gather_gradient, join, recipe_of, update_samples
from tests.extent import few

# dense layers and layers with experts, shared experts, attention biases; a layer for each chunk of virtual stages
FAMILY, CHANGES = "glm4_moe", {"n_shared_experts": 2, "num_hidden_layers": 4}
EVERY = few(("one", "TP2 ETP2", "TP2 EP2", "PP2", "PP2 VPP2", "CP2", "EP2", "DP2"), "one", "TP2 EP2", "PP2 VPP2", "CP2")
CASES = {"all": {}, "experts": {"targets": ["experts.linear_fc1", "mlp.linear_fc2"]}}


def actor_of(layout: str, case: str, model: Path) -> Any:
    from megarl.actor import step

    # the layout "one" recomputes nothing, so the comparison with it tests recomputation too
    table = {"recompute": "none" if layout == "one" else "full", "lora": {"rank": 4, "alpha": 2.0, **CASES[case]}}
    return step.Actor.build(recipe_of(LAYOUTS[layout], model, actor=table), model, torch.device("cpu"))


def batches_of(actor: Any, rollouts: Path, update: int) -> list[Any]:
    from megarl.actor import packing

    # the layout "one" packs whole sequences, so the comparison with it tests shared prompts too
    share = dist.get_world_size() > 1 and actor.models[0].shares_prompts
    return packing.micro_batches(update_samples(rollouts, update), 128, actor.device, share=share)


def whole(actor: Any, value: Any) -> dict[str, torch.Tensor]:
    """{key in a checkpoint: ``value(parameter)``} for all adapters, as whole tensors assembled from all ranks.

    Asserts that ranks with the same part of a tensor agree.
    """
    from megarl.actor import lora

    mine = [
        (tensor.key, tensor.global_shape, tensor.global_offset, value(tensor.data).detach().cpu().float())
        for model in actor.models
        for tensor in lora.sharded_state(model).values()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, torch.Tensor] = {}
    for key, shape, offset, part in (entry for rank in everyone for entry in rank):
        place = tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))
        tensor = found.setdefault(key, torch.full(shape, torch.nan))
        assert bool(tensor[place].isnan().all()) or torch.allclose(tensor[place], part, rtol=1e-6, atol=1e-9), key
        tensor[place] = part
    return found


def gradient(actor: Any) -> dict[str, torch.Tensor]:
    """The gradients of all adapters, of the update just computed."""
    gather_gradient(actor)
    return whole(actor, lambda parameter: parameter.main_grad)


def train(layout: str, case: str, model: Path, rollouts: Path, folder: Path) -> dict[str, Any]:
    """Gradient, norm and loss of the second update, and the policy after it.

    The layout "one" makes the first update and saves a checkpoint, from which the other layouts begin.
    """
    from megarl.actor import checkpoint, step
    from megarl.actor.hf import export_hf
    from tests.actor.test_hf_layouts import stored

    objective, actor = build_objective("reinforce", {}), actor_of(layout, case, model)
    begun, saved = whole(actor, lambda parameter: parameter), folder / f"{case} checkpoints"
    if layout == "one":
        step.train_step(actor, batches_of(actor, rollouts, 0), objective, lr=1e-2)
        checkpoint.save(actor, saved, 1, keep=1)
    else:
        assert checkpoint.load(actor, saved / "update_000001") == 1
    step.compute_gradients(actor, batches_of(actor, rollouts, 1), objective)
    results: dict[str, Any] = {"begun": begun, "gradient": gradient(actor)}
    metrics = step.train_step(actor, batches_of(actor, rollouts, 1), objective, lr=1e-2)
    target = folder / f"{case} {layout}"
    export_hf(actor.models, target, model, 2)
    return results | {"norm": metrics["grad_norm"], "loss": metrics.get("loss"), "policy": stored(target)}


def worker(rank: int, ranks: int, model: Path, rollouts: Path, folder: Path) -> None:
    join(rank, ranks, folder)
    from megatron.core import parallel_state as mpu

    from megarl.actor import parallel

    for layout in EVERY:
        if LAYOUTS[layout].ranks != ranks:
            continue
        parallel.build_groups(recipe_of(LAYOUTS[layout], model))
        results = {case: train(layout, case, model, rollouts, folder) for case in CASES}
        if parallel.reports_metrics():
            torch.save(results, folder / f"{layout}.pt")
        dist.barrier()
        mpu.destroy_model_parallel()
    dist.destroy_process_group()
