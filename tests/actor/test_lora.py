"""Low-rank adapters: what they train, what they export, what a checkpoint of them gives back, what is refused."""

import pytest
import torch
from safetensors.torch import load_file

from megarl.objectives import build_objective
from tests.actor.conftest import make_hf_model, make_recipe
from tests.actor.test_step import CPU, make_samples

pytestmark = pytest.mark.usefixtures("one_rank")


def build(path, rank=4, **lora):
    from megarl.actor.step import Actor

    return Actor.build(make_recipe(path, actor={"lora": {"rank": rank, **lora}}), path, CPU)


def updates(actor, numbers):
    from megarl.actor.packing import micro_batches
    from megarl.actor.step import train_step

    objective = build_objective("mu_grpo", {})
    return [train_step(actor, micro_batches(make_samples(seed=n), 64, CPU), objective, lr=1e-2) for n in numbers]


def test_smoke(tmp_path):
    make_hf_model("qwen3_moe").save_pretrained(tmp_path)
    actor = build(tmp_path)
    for n, p in actor.models[0].named_parameters():
        print(n, tuple(p.shape), p.requires_grad)
    print(updates(actor, range(3)))
