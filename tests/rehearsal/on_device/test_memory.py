"""The activation memory of `megarl plan` compared with what autograd keeps in bfloat16 with a GPU's operators.

What is kept is averaged over ranks, because some have more tokens for their experts than others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.planner.assumptions import Assumptions
from megarl.planner.parameter_counts import StageParameters
from megarl.planner.plan import Plan
from megarl.recipe.layout import Layout
from megarl.recipe.tables import Recipe
from tests.actor.conftest import make_recipe, read_settings
from tests.rehearsal.forks import in_ranks
from tests.rehearsal.updates import device_of, join

TOKENS, LAYERS = 1000, 4
WIDTHS = dict(hidden_size=128, intermediate_size=320, num_attention_heads=8, num_hidden_layers=LAYERS)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=96, first_k_dense_replace=0, mlp_only_layers=[])
EIGHT = EXPERTS | {"num_experts": 8}
NEXT = EIGHT | dict(shared_expert_intermediate_size=200, linear_num_key_heads=4, linear_num_value_heads=8)
NEXT |= dict(linear_key_head_dim=32, linear_value_head_dim=24)
# case: the tiny model of `tests.actor.conftest`, and changes of it beside `WIDTHS`; a model for each formula of a part
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EIGHT),
    "olmoe": ("olmoe", EIGHT | {"intermediate_size": 96}),
    "glm4_moe": ("glm4_moe_qk_norm", EXPERTS),
    "deepseek_v3": (
        "deepseek_v3",
        EXPERTS
        | dict(n_group=1, topk_group=1, n_shared_experts=1, q_lora_rank=96, kv_lora_rank=80, num_key_value_heads=8)
        | dict(qk_nope_head_dim=24, v_head_dim=16),
    ),
    "qwen3_next": ("qwen3_next", NEXT | {"full_attention_interval": 1}),
    "qwen3_next with linear attention": ("qwen3_next", NEXT | {"full_attention_interval": 9}),
    "gpt_oss": ("gpt_oss", EXPERTS | dict(num_local_experts=8, intermediate_size=96, sliding_window=40)),
    # an eighth of the published widths, with all experts
    "gpt_oss_20b": (
        "gpt_oss",
        dict(hidden_size=360, intermediate_size=360, num_key_value_heads=1, head_dim=64, num_local_experts=32)
        | dict(num_experts_per_tok=4, sliding_window=128),
    ),
}
TP2_EP2 = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}
CP2, LORA = {"context_parallel": 2}, {"lora": {"rank": 8}}
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    *((family, "none", {}) for family in MODELS if family != "gpt_oss_20b"),
    ("qwen3", ["mlp", "core_attn"], {}),
    ("qwen3_moe", "full", {}),
    ("glm4_moe", ["shared_experts"], {}),
    ("deepseek_v3", ["core_attn"], {}),
    # tokens that attend to nearly as many keys as they may
    *((f"{family} sharing", "none", {}) for family in ("qwen3", "qwen3_moe", "deepseek_v3")),
    *((family, "none", TP2_EP2) for family in ("qwen3_moe", "deepseek_v3")),
    ("qwen3_next", ["moe"], TP2_EP2),
    ("qwen3_moe", "none", {"expert_parallel": 2}),
    *((family, "none", CP2) for family in ("qwen3_moe", "deepseek_v3")),
    ("qwen3", "none", {"tensor_parallel": 2}),
    *((family, "none", LORA) for family in ("qwen3", "qwen3_moe")),
    ("qwen3_moe", ["moe"], LORA),
    ("gpt_oss_20b", ["moe", "core_attn"], {}),
]


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operators create, now and at the peak; those of ``known`` are left out."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def one_rank(rank: int, ranks: int, hf: dict[str, Any], recipe: Recipe, share: bool, folder: Path) -> dict[str, int]:
    """Bytes that autograd keeps after a forward pass, and most bytes in a forward and backward pass.

    Parameters, gradient buffers and inputs are left out. Also numbers of parameters.
    """
    join(rank, ranks, "cuda", folder / "meeting")
    from megarl.actor import lora, parallel
    from megarl.actor.model import build_model
    from megarl.actor.optimizer import wrap
    from megarl.actor.packing import Sample, micro_batches

    parallel.build_groups(recipe, gloo=False)
    models = build_model(hf, recipe)
    lora.attach(models, recipe)
    for parameter in models[0].parameters():
        parameter.data.normal_(std=0.05)
    replicas, _ = wrap(models, recipe)
    for replica in replicas:
        replica.zero_grad_buffer()
    prompt = 801 if share else 1
    layout = Layout.of(recipe, ranks)
    rng, length = np.random.default_rng(rank if layout.expert_parallel > 1 else 0), (TOKENS - prompt + 1) // 4
    samples = [
        Sample(np.zeros(prompt, np.int32), rng.integers(2, 67, length), np.zeros(length), 1.0)
        for _ in range(4 * layout.data_parallel)
    ]
    (batch,) = micro_batches(samples, TOKENS, device_of("cuda"), share=share)
    buffers = [b.grad_data for b in replicas[0].buffers + replicas[0].expert_parallel_buffers]
    known = [*(p.data for p in models[0].parameters()), *buffers, batch.tokens, batch.labels, batch.positions]
    ids, saved = {x.untyped_storage()._cdata for x in known}, {}

    def forward() -> torch.Tensor:
        return models[0](batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)[0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ids:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    kept = sum(storage.nbytes() for storage in saved.values())
    del output
    saved.clear()
    with Live(known) as live:
        forward().sum().backward()
    named = list(models[0].named_parameters())
    return {
        "kept": kept,
        "peak": live.peak,
        "expert": sum(p.numel() for name, p in named if ".experts." in name),
        "dense": sum(p.numel() for name, p in named if ".experts." not in name),
    }


@pytest.mark.parametrize(
    ("family", "recompute", "table"), CASES, ids=lambda x: " ".join(map(str, x)) if x and not isinstance(x, str) else x
)
def test_activations_agree_with_the_plan(tmp_path: Path, family: str, recompute: Any, table: dict[str, Any]) -> None:
    ranks = 2 if table and "lora" not in table else 1
    name, changes = MODELS[family.removesuffix(" sharing")]
    hf = read_settings(tmp_path, name, **WIDTHS | changes)
    actor = {"backend": "cuda", "layers": "torch", "kernels": "torch", "recompute": recompute, **table}
    actor["tokens_per_micro_batch"] = TOKENS
    recipe = make_recipe(actor=actor, rollout={"max_response_tokens": 8}, data={"max_prompt_tokens": 8})
    share = family.endswith(" sharing")
    found = in_ranks(lambda rank: one_rank(rank, ranks, hf, recipe, share, tmp_path), ranks)
    counts = StageParameters(LAYERS, found[0]["dense"], found[0]["expert"])
    layout = Layout.of(recipe, ranks)
    # after the layers the head keeps the output of the final norm
    behind = 2 * TOKENS / layout.context_parallel * hf["hidden_size"]
    measured = sum(rank["kept"] for rank in found) / ranks
    items = Plan(recipe, hf, 1, "h100", layout, counts, [counts], Assumptions(expert_imbalance=1.0)).optimize
    kept = items["activations"] + behind
    planned = kept + items["backward pass of a layer, or of log-probs"]
    peak = max(rank["peak"] for rank in found)
    assert 0.975 * measured < kept < 1.25 * measured
    assert planned > peak
