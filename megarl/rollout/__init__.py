"""Rollout engines: `engine.py` is the contract, every other module the only importer of its engine."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.models.hf_config import read_hf_config
from megarl.storage.reference_logprobs import REFERENCE_TOKENS

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe
    from megarl.rollout.engine import RolloutEngine


AVAILABLE = ("builtin", "vllm", "sglang")
RECORD_EXPERTS = ("sglang",)  # of each token, on request
TEMPERATURES = {  # what they sample at
    "vllm": (0.01, 2.0),  # it moves what is below, without a word, and refuses what is above
    "sglang": (1e-6, math.inf),  # below it takes the most likely token
}


def build_engine(
    recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool = False
) -> RolloutEngine:
    """The engine of a stage with the policy of ``policy_dir`` loaded; one replica of it belongs to this process.

    routed_experts: record which experts each token went to.
    """
    table, device = recipe.rollout_of(stage), recipe.actor.backend
    assert table.engine in (RECORD_EXPERTS if routed_experts else AVAILABLE), "preflight lets no other pass"
    if table.engine == "builtin":
        from megarl.rollout.builtin import BuiltinEngine

        return BuiltinEngine(policy_dir, version, "cpu" if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    longest = recipe.data.max_prompt_tokens + table.max_response_tokens
    limits: dict[str, Any] = {
        "device": device,
        "context": max(longest, min(REFERENCE_TOKENS + 1, read_hf_config(policy_dir)["max_position_embeddings"])),
        "responses": table.groups_per_chunk * table.responses_per_prompt,
        "memory_fraction": table.memory_fraction,
        "tensor_parallel": table.tensor_parallel,
    }
    if table.engine == "vllm":
        from megarl.rollout import vllm

        return vllm.VllmEngine(policy_dir, version, vllm.Settings(**limits))
    from megarl.rollout.sglang import engine as sglang

    python = table.sglang_python or Path(sys.executable)
    settings = sglang.Settings(**limits, python=python, routed_experts=routed_experts)
    return sglang.SglangEngine(policy_dir, version, settings)
