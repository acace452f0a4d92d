"""Everything about a recipe that can be known before a process starts, checked before one does."""

from __future__ import annotations

import importlib.util

from megarl.config import Recipe
from megarl.data import build_prompts, check_tokenizer_fits, load_tokenizer
from megarl.errors import UserError
from megarl.policy import weight_files


def check(recipe: Recipe) -> None:
    """`UserError` for a missing model, an unfit tokenizer, unreadable prompts, an absent engine or a wrong layout."""
    if not recipe.model.path.is_dir():
        raise UserError(f"[model] path: {recipe.model.path} is not a directory")
    weight_files(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)
    check_tokenizer_fits(tokenizer, recipe.model.path)
    prompts = build_prompts(recipe, tokenizer)
    prompts.train(0)
    if recipe.eval.every:
        prompts.heldout()
    if recipe.rollout.engine != "builtin":
        raise UserError(f"[rollout] engine = {recipe.rollout.engine!r} is not available yet; use 'builtin'")
    if recipe.rollout.tensor_parallel > 1:
        raise UserError("[rollout] tensor_parallel > 1: the built-in engine runs a replica in one process")
    if recipe.run.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("[run] wandb = true, but wandb is not installed: pip install wandb")
    check_layout(recipe)


def check_layout(recipe: Recipe) -> None:
    actor = recipe.actor
    model_ranks = actor.tensor_parallel * actor.pipeline_parallel * actor.context_parallel
    if actor.processes_per_node % model_ranks:
        raise UserError(
            f"[actor] processes_per_node = {actor.processes_per_node} is no multiple of tensor_parallel * "
            f"pipeline_parallel * context_parallel = {model_ranks}"
        )
    if actor.context_parallel > 1:
        raise UserError("[actor] context_parallel > 1 is not supported yet; use tensor or pipeline parallelism")
    if actor.backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError('[actor] backend = "cuda", but torch sees no GPU here; backend = "cpu" runs without one')
