"""Makes updates in every composition of layers, adapters, precision and replay, and prints results as JSON.

Run as ``python -m tests.actor.te_worker FOLDER FAMILY...``, with the folder `stand_ins` on PYTHONPATH: it has stand-ins
for Transformer Engine's classes.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.rollout.continuous import checked_experts
from tests.actor.conftest import FAMILIES, make_hf_model, make_recipe
from tests.actor.test_step import make_samples
from tests.extent import few

KINDS = ("torch", "transformer_engine")
REPLAYS = {"": "none", " actor": "actor", " replay": "engine"}
# of models with experts
COMPOSITIONS = few(("", " lora", " actor", " lora actor", " replay", " lora replay"), "", " lora replay")
STEADY = {"eps": 1e-3}  # Adam's default turns the rounding of a gradient near 0 into a step of full size
RESUMED = ("qwen3_moe", "deepseek_v3", "gpt_oss")  # families whose checkpoints are loaded into the other kind of layers
# every size is a multiple of 16, as fp8 needs it
WIDE = dict(intermediate_size=32, moe_intermediate_size=32, shared_expert_intermediate_size=48, q_lora_rank=32,
            kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=16)  # fmt: skip
WIDE_ROTARY = {"head_dim": 16}  # of latent attention, where transformers calls qk_rope_head_dim so as well
LATENT = ["q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"]
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
ALIGN = 16


def main(folder: Path, families: list[str]) -> None:
    from megarl.actor import parallel
    from megarl.distributed import become_single_process

    become_single_process()
    device = parallel.initialize(make_recipe())
    print(json.dumps({family: compared(family, folder / family, device) for family in families}))
    torch.distributed.destroy_process_group()


def with_experts(samples: list[Any], hf: dict[str, Any]) -> list[Any]:
    """The samples with experts that an engine might have recorded, of which 0 in dense layers is made -1."""
    rng = np.random.default_rng(0)

    def record(tokens: int) -> np.ndarray:
        scores = rng.random((tokens, hf["num_hidden_layers"], hf["num_experts"]))
        chosen = scores.argsort(2)[:, :, : hf["num_experts_per_tok"]]
        chosen[:, [layer for layer in range(hf["num_hidden_layers"]) if layer not in hf["sparse_layers"]]] = 0
        return checked_experts(chosen, tokens, hf, cut_off=False)

    return [replace(sample, routed_experts=record(len(sample))) for sample in samples]


def compared(family: str, folder: Path, device: torch.device) -> dict[str, Any]:
    from megarl.actor.hf import export_hf
    from megarl.actor.peft import export_adapters
    from megarl.models.hf_config import read_hf_config

    wide = {key: size for key, size in WIDE.items() if key in FAMILIES[family]}
    latent_attention = WIDE_ROTARY if "qk_rope_head_dim" in wide else {}
    make_hf_model(family, **wide, **latent_attention).save_pretrained(folder / "model")
    hf = read_hf_config(folder / "model")
    latent = [f"linear_{name}" for name in LATENT] + TARGETS[1:]
    targets = latent if "deepseek" in family else TARGETS
    tables: dict[str, Any] = {"": {}, " lora": {"lora": {"rank": 4, "targets": targets}}}
    result: dict[str, Any] = {"losses": {}, "routing": {}, "products": {}, "scores": {}}
    for lora, table in tables.items():
        actors = {kind: (table | {"layers": kind}, {}) for kind in KINDS}
        actors["fp8"] = (table | {"layers": KINDS[1]}, FP8)
        for kind, (own, megatron) in actors.items():
            for replay in REPLAYS:
                composition = f"{lora}{replay}"
                if composition not in (COMPOSITIONS if hf["num_experts"] else tables):
                    continue
                name = f"{kind}{composition}"
                table_of_actor = own | {"routing_replay": REPLAYS[replay]}
                actor, losses = trained(folder / "model", table_of_actor, megatron, hf, device, result, name)
                result["losses"][name] = losses
                if kind == KINDS[1] and not lora and not replay:
                    result["names"] = [key for key, _ in actor.models[0].named_parameters()]
                export_hf(actor.models, folder / name, folder / "model", 2)
                if lora and family != "gpt_oss":  # PEFT has no names for adapters of its experts
                    table_of = actor.recipe.actor.lora
                    export_adapters(actor.models, folder / f"{name} adapters", table_of, folder / "model", None, 2)
                if not megatron:
                    result["scores"][name] = scored(actor, folder / name, device)
    if family in RESUMED:
        result["resumed"] = {lora: resumed(folder, table, device, lora) for lora, table in tables.items()}
    return result


def trained(
    model: Path, table: Any, megatron: Any, hf: Any, device: torch.device, result: Any, name: str
) -> tuple[Any, list[float]]:
    """An actor after two updates, and their losses. table, hf: settings of the actor and of the model."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as State

    from megarl.actor.frozen import FrozenPolicy
    from megarl.actor.step import Actor

    recipe = make_recipe(model, actor=table, megatron=megatron, optimizer=STEADY)
    actor = Actor.build(recipe, model, device)
    if table["routing_replay"] == "actor":
        actor.frozen.append(FrozenPolicy.build(("routed_experts",), recipe, model))
    replayed = hf if table["routing_replay"] == "engine" else None
    State.products, losses = 0, []
    State.rounded_to = torch.bfloat16  # finer than 8 bits, so that a fault is larger than the rounding
    for _ in range(2):
        metrics = update(actor, device, replayed)
        losses.append(metrics["loss"])
    State.rounded_to = torch.float8_e4m3fn
    if megatron:
        losses.append(update(actor, device, replayed)["loss"])
    result["routing"][name] = metrics.get("routing/disagreement")
    result["products"][name] = State.products
    return actor, losses


def scored(actor: Any, exported: Path, device: torch.device) -> list[list[float]]:
    """The log-probs of a text, of the actor and of the built-in engine with the exported policy."""
    from megarl.actor import reference
    from megarl.rollout.builtin import BuiltinEngine

    text = [[(7 * i + 3) % 67 for i in range(20)]]
    (ours,), (engines,) = reference.score(actor.models, text, 64, device), BuiltinEngine(exported, 2).score(text)
    return [ours.tolist(), engines.tolist()]


def update(actor: Any, device: torch.device, replayed: Any = None) -> dict[str, Any]:
    from megarl.actor import packing
    from megarl.actor.step import train_step
    from megarl.objectives import build_objective

    samples = with_experts(make_samples(), replayed) if replayed else make_samples()
    return train_step(actor, packing.micro_batches(samples, 24, device, ALIGN), build_objective("mu_grpo", {}), 1e-2)


def resumed(folder: Path, table: Any, device: torch.device, name: str) -> dict[str, float]:
    """The loss of a second update, from the checkpoint of either kind of layers with either kind."""
    from megarl.actor import checkpoint
    from megarl.actor.step import Actor

    losses = {}
    for source in KINDS:
        recipe = make_recipe(folder / "model", actor=table | {"layers": source}, optimizer=STEADY)
        actor = Actor.build(recipe, folder / "model", device)
        update(actor, device)
        checkpoint.save(actor, folder / f"{source}{name} checkpoints", 1, keep=1)
        losses[source] = update(actor, device)["loss"]
        for target in KINDS:
            recipe = make_recipe(folder / "model", actor=table | {"layers": target}, optimizer=STEADY)
            other = Actor.build(recipe, folder / "model", device)
            ((_, path),) = checkpoint.checkpoints(folder / f"{source}{name} checkpoints")
            checkpoint.load(other, path)
            losses[f"{source} -> {target}"] = update(other, device)["loss"]
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
