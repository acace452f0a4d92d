"""What a MoE layer moves through memory beside its matrix products, and how often it launches and waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.conftest import SHAPE, make_recipe
from tests.extent import EVERY
from tests.rehearsal.counts import Moved, counted
from tests.rehearsal.forks import in_ranks
from tests.rehearsal.updates import device_of, join

TOKENS = 96
# an eighth of the widths of Qwen3-30B-A3B, a quarter of its experts
HF = SHAPE | dict(
    model_type="qwen3_moe", hidden_size=256, moe_intermediate_size=96, num_experts=32, num_experts_per_tok=8,
    norm_topk_prob=True, rope_theta=1e4, rope_scaling_factor=None, rotary_fraction=1.0, num_hidden_layers=1,
)  # fmt: skip


def one_layer(rank: int, ranks: int, kernels: str, folder: Path, dtype: torch.dtype) -> tuple[Any, ...]:
    """Bytes, launches and waits of a forward and backward pass, and the gradients by name."""
    join(rank, ranks, "cuda", folder / f"meeting-{kernels}-{dtype}")
    from megarl.actor import parallel
    from megarl.actor.model import build_model

    actor = {"backend": "cuda", "kernels": kernels, "expert_parallel": ranks, "processes_per_node": ranks}
    recipe = make_recipe(actor=actor)
    parallel.build_groups(recipe, gloo=False)
    (model,) = build_model(HF, recipe)
    layer = model.decoder.layers[0].mlp.to(dtype)
    torch.manual_seed(rank)
    for parameter in layer.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape))
    hidden = torch.randn(TOKENS, 1, HF["hidden_size"]).to(dtype).to(device_of("cuda")).requires_grad_()
    gradient = torch.randn(hidden.shape).to(dtype).to(hidden.device)
    with Moved() as moved, counted() as seen:
        output, _ = layer(hidden)
        output.backward(gradient)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"hidden": hidden.grad}
    found = {name: x.float().cpu().numpy() for name, x in gradients.items()}
    return moved.bytes, seen.launch_count, seen.waits.total(), found


@pytest.mark.parametrize("ranks", [1] * EVERY + [2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # with the kernels only the order of sums differs, and there are fewer roundings to bfloat16
    [(torch.float32, 1e-6), (torch.bfloat16, 0.01)],
)
def test_the_fused_layer_has_the_same_gradients_and_moves_fewer_bytes(tmp_path, ranks, dtype, tolerance):
    (bytes_before, *before, gradients), (bytes_after, *after, fused) = (
        in_ranks(lambda rank, k=kernels: one_layer(rank, ranks, k, tmp_path, dtype), ranks)[0]
        for kernels in ("torch", "triton")
    )
    print(f"\n{ranks} ranks: bytes {bytes_before} -> {bytes_after}, launches and waits {before} -> {after}")
    assert after[0] < before[0] and after[1] <= before[1]
    most = 3 / 5 if ranks == 1 else 2 / 3  # ranks exchange the same bytes in both
    assert dtype is not torch.bfloat16 or bytes_after <= bytes_before * most
    for name, right in gradients.items():
        assert np.linalg.norm(fused[name] - right) <= tolerance * np.linalg.norm(right), name
