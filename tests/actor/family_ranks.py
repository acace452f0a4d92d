"""What one rank of `test_family_layouts` computes: updates of every model family in its layouts of `FAMILIES`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.objectives import build_objective
from tests.actor.layout_ranks import LAYOUTS, join, recipe_of, update_samples, whole_gradient
from tests.extent import few

EVERY = ("one", "TP2 EP2", "PP2 uneven", "CP2")
FAMILIES = {  # names in `tests.actor.conftest`, each with the layouts for which the family's layers have their own code
    "olmoe": ("one", "TP2 EP2"),
    "qwen2_moe": ("one", "TP2 EP2"),
    "glm4_moe": ("one", "TP2 EP2", "PP2 uneven"),
    "deepseek_v3": EVERY,
    "deepseek_v3_moonlight": ("one", "TP2 EP2"),
    "qwen3_next": EVERY,
    "gpt_oss": EVERY,
    "qwen3_5_moe": ("one", "TP2 EP2", "PP2 uneven"),
}
# those with layers that no other family has
TRAINED = few(FAMILIES, "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss")
PARTS = {  # parts of a layer that layouts of two ranks without pipeline stages recompute
    "olmoe": ["core_attn", "layernorm", "moe"],
    "qwen2_moe": ["layernorm", "mlp", "shared_experts"],
    "glm4_moe": ["layernorm", "mlp", "moe"],
    "deepseek_v3": ["core_attn", "layernorm", "mlp", "shared_experts"],
    "deepseek_v3_moonlight": ["core_attn", "moe"],
    "qwen3_next": ["core_attn", "layernorm", "moe"],
    "qwen3_5_moe": ["layernorm", "moe", "shared_experts"],
    "gpt_oss": ["core_attn", "layernorm", "moe"],
}
# families that pass a checkpoint from layout to layout: each loads that of the layout before it and saves a new one
CONTINUED = few(("olmoe", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss"), "glm4_moe", "deepseek_v3")


def train(name: str, layout: str, models: Path, rollouts: Path, folder: Path) -> dict[str, Any]:
    """The first gradient, and losses and gradient norms of two updates; they replay the initial policy's experts."""
    from megarl.actor import frozen, packing, step

    # the layout "one" recomputes nothing, so the comparison with it tests recomputation too
    recompute = {"one": "none", "PP2 uneven": "full"}.get(layout, PARTS[name])
    table = {"recompute": recompute, "routing_replay": "actor"}
    recipe = recipe_of(LAYOUTS[layout], models / name, actor=table)
    actor = step.Actor.build(recipe, models / name, torch.device("cpu"))
    actor.frozen.append(frozen.FrozenPolicy.build(("routed_experts",), recipe, models / name))
    objective = build_objective("reinforce", {})
    gradient, losses, norms = {}, [], []
    for update in range(2):
        # the layout "one" packs whole sequences, so the comparison with it tests shared prompts too
        share = layout != "one" and actor.models[0].shares_prompts
        batches = packing.micro_batches(update_samples(rollouts, update), 128, actor.device, share=share)
        if update == 0:
            step.compute_gradients(actor, batches, objective)
            gradient = whole_gradient(actor, models / name, folder / f"gradient {layout}")
        metrics = step.train_step(actor, batches, objective, lr=1e-2)
        losses.append(metrics.get("loss"))  # None outside the last pipeline stage
        norms.append(metrics["grad_norm"])
    return {"gradient": gradient, "losses": losses, "norms": norms}


def continued(name: str, layout: str, models: Path, rollouts: Path, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of two policies: as the newest checkpoint, by another layout, gives it, and after one more update.

    The first layout finds no checkpoint and begins with the initial policy. The second policy is saved as a checkpoint.
    The layout "one" then goes on, and also gives the policy after the update of each layout that comes later.
    """
    from megarl.actor import checkpoint, packing, step
    from megarl.actor.hf import export_hf
    from tests.actor.test_hf_layouts import stored

    recipe, target = recipe_of(LAYOUTS[layout], models / name), folder / f"{name} {layout}"
    actor = step.Actor.build(recipe, models / name, torch.device("cpu"))
    found = checkpoint.checkpoints(folder / f"{name} checkpoints")
    done = checkpoint.load(actor, found[-1][1]) if found else 0
    export_hf(actor.models, target / "loaded", models / name, 0)
    policies = [stored(target / "loaded")]
    for update in range(len(FAMILIES[name]) if layout == "one" else 1):
        samples, share = update_samples(rollouts, (done + update) % 2), actor.models[0].shares_prompts
        batches = packing.micro_batches(samples, 128, actor.device, share=share)
        step.train_step(actor, batches, build_objective("reinforce", {}), lr=1e-2)
        if update == 0:
            checkpoint.save(actor, folder / f"{name} checkpoints", done + 1, keep=1)
        export_hf(actor.models, target / f"after {update}", models / name, 0)
        policies.append(stored(target / f"after {update}"))
    return policies


def worker(rank: int, ranks: int, models: Path, rollouts: Path, folder: Path) -> None:
    join(rank, ranks, folder)
    from megatron.core import parallel_state as mpu

    from megarl.actor import parallel

    results: dict[Any, Any] = {}
    for layout in EVERY:
        if LAYOUTS[layout].ranks != ranks:
            continue
        recipe = recipe_of(LAYOUTS[layout], models / TRAINED[0])
        parallel.build_groups(recipe)
        for name in TRAINED:
            layouts = FAMILIES[name]
            if layout in layouts:
                results[name, layout] = train(name, layout, models, rollouts, folder)
            if layout in layouts and name in CONTINUED:
                results[name, layout]["continued"] = continued(name, layout, models, rollouts, folder)
        if parallel.reports_metrics():
            torch.save(results, folder / f"{layout}.pt")
        results.clear()
        dist.barrier()
        mpu.destroy_model_parallel()
    dist.destroy_process_group()
