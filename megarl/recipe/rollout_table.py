"""``[rollout]`` and ``[stages.N]`` of a recipe: how responses are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megarl.recipe.base import Table, one_of
from megarl.recipe.names import ENGINES

Engine = Annotated[str, one_of(ENGINES)]
# keys of [rollout] that belong to one engine; they start programs or fit one machine, so packed stages have none
ENGINE_KEYS = ("sglang_python", "vllm", "sglang")


class RolloutTable(Table):
    """``[rollout]``: the engine, its replicas, and how responses are sampled."""

    engine: Engine = "builtin"  # what generates responses: docs/rollout_engines.md
    workers: int = Field(1, ge=1, le=1024)  # engine replicas on each node
    tensor_parallel: int = Field(1, ge=1, le=1024)  # GPUs per replica
    temperature: float = Field(1.0, ge=1e-4)  # logits are divided by it, in the actor's log-probs too
    max_response_tokens: int = Field(1024, ge=1, le=10**9)  # tokens, stop token included
    responses_per_prompt: int = Field(8, ge=1, le=10**5)  # G, the size of a group
    oversample: float = Field(1.0, ge=1, le=1000)  # candidate groups per group that is trained (dynamic sampling)
    # staged runs: the most tokens that a response gets in one stage; unfinished ones are continued in the next stage
    token_budget: int | None = Field(None, ge=1)
    groups_per_chunk: int = Field(128, ge=1, le=10**6)  # groups that an engine is given at a time
    memory_fraction: float | None = Field(None, gt=0, le=1)  # share of GPU memory; default: the engine's own
    float32_head: bool = True  # compute logits in float32 from the bf16 head, as the actor does
    response_timeout: float = Field(3600.0, gt=0)  # seconds from a response's start until it is cut off
    sglang_python: Path | None = Field(None, strict=False)  # the interpreter that has SGLang; default: megarl's own
    vllm: dict[str, Any] = Field({})  # options passed through to vllm
    sglang: dict[str, Any] = Field({})  # options passed through to sglang

    def options(self, engine: str) -> dict[str, Any]:
        """``[rollout.ENGINE]``, the options that are passed through to an engine."""
        return getattr(self, engine, {})

    def interpreter(self, engine: str) -> Path | None:
        """``[rollout] ENGINE_python``; None: megarl's own interpreter."""
        return getattr(self, f"{engine}_python", None)


class StageTable(Table):
    """``[stages.N]``: settings of ``[rollout]`` that differ in stage N."""

    engine: Engine | None = None  # default of this and the next three: that of [rollout]
    workers: int | None = Field(None, ge=1, le=1024)  # engine replicas on each node
    tensor_parallel: int | None = Field(None, ge=1, le=1024)  # GPUs per replica
    memory_fraction: float | None = Field(None, gt=0, le=1)  # share of GPU memory
