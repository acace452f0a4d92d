"""Makes updates in every composition of layers, adapters and replay, and compares both kinds of layers.

Run as ``python -m tests.actor.te_worker FOLDER FAMILY...``, with the folder `stand_ins` on PYTHONPATH: it has stand-ins
for Transformer Engine's classes.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.actor import checkpoint, packing, parallel, reference
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.hf import export_hf
from megarl.actor.peft import export_adapters
from megarl.actor.step import Actor, train_step
from megarl.distributed import become_single_process
from megarl.models.hf_config import read_hf_config
from megarl.objectives import build_objective
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.continuous import checked_experts
from tests.actor.conftest import make_hf_model, make_recipe
from tests.actor.test_lora import check_peft, every_target
from tests.actor.test_step import make_samples
from tests.extent import few

KINDS = ("torch", "transformer_engine")
# of models with experts; "replay": of the engine's experts
COMPOSITIONS = few(("", " lora", " actor", " lora actor", " replay", " lora replay"), "", " lora replay")
STEADY = {"eps": 1e-3}  # Adam's default turns the rounding of a gradient near 0 into a step of full size
RESUMED = ("qwen3_moe", "deepseek_v3", "gpt_oss")  # families whose checkpoints are loaded into the other kind of layers
TEXT = [[(7 * i + 3) % 67 for i in range(20)]]
CPU = torch.device("cpu")


def check(family: str, folder: Path) -> None:
    """Assert what every composition and kind of layers must have in common, and what not."""
    model = folder / "model"
    make_hf_model(family).save_pretrained(model)
    hf = read_hf_config(model)
    adapters = {"lora": {"rank": 4, "targets": every_target(hf)}}
    first: dict[str, float] = {}
    for composition in COMPOSITIONS if hf["num_experts"] else ("", " lora"):
        where, replay = f"{family}{composition}", composition.removeprefix(" lora").strip()
        table = {"routing_replay": {"": "none", "replay": "engine"}.get(replay, replay)}
        table |= adapters if "lora" in composition else {}
        (plain, ours, routing), (actor, theirs, _) = (trained(model, table | {"layers": kind}, hf) for kind in KINDS)
        assert theirs == pytest.approx(ours, rel=1e-4), where
        assert ours[1] != pytest.approx(ours[0], rel=1e-3), where  # an update changes the loss by far more
        compare_exports(plain, actor, folder / where)
        first[composition] = ours[0]
        same = composition.removeprefix(" lora").replace(" actor", "")
        # adapters begin at zero, and the policy that generated is the one that begins
        assert ours[0] == pytest.approx(first.get(same, ours[0]), rel=1e-4), where
    names = {name for name, _ in actor.models[0].named_parameters()}
    assert any(".mlp.experts.linear_fc1.weight3" in name for name in names) == bool(hf["num_experts"]), family
    if hf["num_experts"]:
        assert ours[0] != pytest.approx(first[""], rel=1e-4), family
        assert 0.1 < routing < 1, family  # the recorded experts are random
    if family in RESUMED:
        for lora, table in {"": {}, " lora": adapters}.items():
            check_resumed(folder, table, lora)


def trained(model: Path, table: Any, hf: Any) -> tuple[Actor, list[float], Any]:
    """An actor after two updates, their losses, and how many experts of the last one differ from the recorded ones.

    table, hf: settings of the actor and of the model.
    """
    recipe = make_recipe(model, actor=table, optimizer=STEADY)
    actor = Actor.build(recipe, model, CPU)
    if table["routing_replay"] == "actor":
        actor.frozen.append(FrozenPolicy.build(("routed_experts",), recipe, model))
    replayed = hf if table["routing_replay"] == "engine" else None
    metrics = [update(actor, replayed) for _ in range(2)]
    return actor, [line["loss"] for line in metrics], metrics[-1].get("routing/disagreement")


def compare_exports(plain: Actor, actor: Actor, folder: Path) -> None:
    """Both kinds of layers export the same policy, in which the built-in engine computes the actor's log-probs."""
    model, lora = actor.recipe.model.path, actor.recipe.actor.lora
    for one, target in ((plain, folder / "torch"), (actor, folder / "engine")):
        export_hf(one.models, target, model, 2)
    ours, theirs, before = (load_file(f / "model.safetensors") for f in (folder / "torch", folder / "engine", model))
    for name, tensor in ours.items():
        assert float((theirs[name] - tensor).abs().max()) < 1e-4, f"{folder}: {name}"
    assert sum(not tensor.equal(before[name]) for name, tensor in ours.items()) > 3, folder
    (mine,), (engines,) = (
        reference.score(actor.models, TEXT, 64, CPU),
        BuiltinEngine(folder / "engine", 2).score(TEXT),
    )
    assert engines.tolist() == pytest.approx(mine.tolist(), abs=1e-4), folder
    if lora is not None and "gpt_oss" not in folder.name:  # PEFT has no names for adapters of its experts
        export_adapters(actor.models, folder / "adapters", lora, model, None, 2)
        assert check_peft(model, folder / "adapters", folder / "engine") > 3, folder


def check_resumed(folder: Path, table: Any, lora: str) -> None:
    """A checkpoint of either kind of layers continues in either kind."""

    def build(kind: str) -> Actor:
        recipe = make_recipe(folder / "model", actor=table | {"layers": kind}, optimizer=STEADY)
        return Actor.build(recipe, folder / "model", CPU)

    expected = None
    for source in KINDS:
        actor = build(source)
        update(actor)
        path = checkpoint.save(actor, folder / f"{source}{lora} checkpoints", 1, keep=1)
        loss = update(actor)["loss"]
        expected = expected or loss
        for target in KINDS:
            other = build(target)
            checkpoint.load(other, path)
            assert [loss, update(other)["loss"]] == pytest.approx([expected] * 2, rel=1e-4), (
                f"{folder}: {source} -> {target}"
            )


def update(actor: Actor, replayed: Any = None) -> dict[str, Any]:
    samples = with_experts(make_samples(), replayed) if replayed else make_samples()
    return train_step(actor, packing.micro_batches(samples, 24, CPU), build_objective("mu_grpo", {}), 1e-2)


def with_experts(samples: list[Any], hf: dict[str, Any]) -> list[Any]:
    """The samples with experts that an engine might have recorded, of which 0 in dense layers is made -1."""
    rng = np.random.default_rng(0)

    def record(tokens: int) -> np.ndarray:
        scores = rng.random((tokens, hf["num_hidden_layers"], hf["num_experts"]))
        chosen = scores.argsort(2)[:, :, : hf["num_experts_per_tok"]]
        chosen[:, [layer for layer in range(hf["num_hidden_layers"]) if layer not in hf["sparse_layers"]]] = 0
        return checked_experts(chosen, tokens, hf, cut_off=False)

    return [replace(sample, routed_experts=record(len(sample))) for sample in samples]


if __name__ == "__main__":
    torch.set_num_threads(1)
    become_single_process()
    parallel.initialize(make_recipe())
    for name in sys.argv[2:]:
        check(name, Path(sys.argv[1]) / name)
    torch.distributed.destroy_process_group()
