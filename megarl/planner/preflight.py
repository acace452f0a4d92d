"""Checks everything about a recipe that can be checked before the processes of a phase start.

The checks of engines, data, verifiers and layouts are in their own modules and are called here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch

from megarl.advantages import group_advantages
from megarl.data.prompts import check_data
from megarl.errors import Note, PhaseFailed, UserError, print_notes
from megarl.foreign import quoted
from megarl.kernels import library
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import check_lora
from megarl.models.settings import check_layers
from megarl.objectives import build_objective, updates_per_step
from megarl.objectives.own import try_objective
from megarl.own_file import is_own
from megarl.phases.entry import hide_gpus_from_cpu_runs, read_end, report_end
from megarl.recipe.layout import check_layout
from megarl.recipe.load import shipped
from megarl.recipe.megatron import suitable_versions
from megarl.recipe.optimizer import check_optimizer
from megarl.recipe.tables import ActorTable, Recipe
from megarl.rewards.parts import check_reward
from megarl.rollout import check_engine
from megarl.storage.metrics.trackers import check_trackers
from megarl.storage.policies import check_weight_files
from megarl.workers.processes import Starter


def check(starter: Starter, recipe: Recipe, nodes: int = 1, optimizes: bool = True) -> None:
    """Run `check_recipe` in a fork of the fork server, which needs the same imports, of several seconds, anyway."""
    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        end = Path(folder) / "end.json"
        code = starter.run(recipe, optimizes, (_check_in_fork, (end, recipe, nodes, optimizes)))
        if code is None:
            check_recipe(recipe, nodes, optimizes)
        elif code:
            said = read_end(end)
            if said["mistake"]:
                raise UserError(said["message"])
            raise PhaseFailed(f"the recipe could not be checked: {said['message'] or f'exit code {code}'}")


def _check_in_fork(end: Path, recipe: Recipe, nodes: int, optimizes: bool) -> NoReturn:
    """Run `check_recipe` in this fork, whose output goes where the agent's goes, and exit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the fork server has blocked them
    print_notes()
    hide_gpus_from_cpu_runs(recipe.actor.backend)
    sys.exit(report_end(lambda: check_recipe(recipe, nodes, optimizes), end, into_log=False))


def check_recipe(recipe: Recipe, nodes: int = 1, optimizes: bool = True) -> None:
    """`UserError` if the run could not start: checks model, data, reward, engines, devices, objective and layout.

    optimizes: False if only engines will run; then the actor's layout need not fit the number of ``nodes``.
    """
    if not (path := recipe.model.path).is_dir():
        remedy = f"For a model of the Hugging Face Hub: hf download OWNER/NAME --local-dir {quoted(path)}"
        script = shipped("examples") / path.parent.name / "make_base.py"
        if path.match("examples/*/base") and script.is_file():
            remedy = f"A script makes it, in the directory {path.parents[2]}: python {quoted(script)}"
        raise UserError(f"[model] path: {path} is not a local directory, and nothing is downloaded. {remedy}")
    hf = read_hf_config(recipe.model.path)
    check_weight_files(recipe.model.path)
    check_data(recipe, hf)
    check_reward(recipe)
    for stage in recipe.distinct_rollouts:
        check_engine(recipe, stage, hf)
    check_devices(recipe)
    check_composition(recipe, hf, nodes if optimizes else None)
    if optimizes:
        _check_router_losses(recipe)
        total, table = recipe.schedule.total_updates, recipe.optimizer
        for name, length in (("warmup_updates", table.warmup_updates), ("decay_updates", table.decay_updates or 0)):
            if length > total:
                warnings.warn(f"[optimizer] {name} = {length}, but the run has {total} updates", Note, stacklevel=2)
    if recipe.objective.path is not None:
        objective = build_objective(recipe.objective.definition, recipe.objective.fields)
        try_objective(objective, recipe.objective.path)
    if is_own(recipe.objective.advantage):
        group_advantages(torch.eye(2, recipe.rollout.responses_per_prompt), recipe.objective.advantage)
    check_trackers(recipe.run)


def check_composition(recipe: Recipe, hf: dict[str, Any], nodes: int | None = 1) -> None:
    """`UserError` for settings that fit neither each other nor the model ``hf``, whatever is installed here.

    nodes: as in `check_layout`.
    """
    check_layers(recipe, hf)
    objective = build_objective(recipe.objective.definition, recipe.objective.fields)
    _check_steps(recipe, updates_per_step(objective, recipe.schedule.sync_every))
    if recipe.mixes_policies and recipe.actor.routing_replay == "actor":
        raise UserError(
            '[actor] routing_replay = "actor" replays the routing of the one policy that generated a stage, but in a '
            'live run, and with rollout.token_budget, several policies generate it: use "engine" or "none", or '
            '[schedule] kind = "staged" without a token_budget'
        )
    check_layout(recipe, hf, nodes)
    check_lora(recipe, hf)


def _check_router_losses(recipe: Recipe) -> None:
    """`UserError` for losses of routers, which have another size than their coefficients say: Megatron multiplies them
    by the tokens of a micro-batch and expects those of the batch as the divisor, but an update is divided by what its
    objective counts."""
    for name, off in (("moe_router_load_balancing_type", "none"), ("moe_z_loss_coeff", 0)):
        if (value := recipe.megatron.get(name) or off) != off:
            raise UserError(
                f"[megatron] {name} = {value!r}: the loss would be divided by what the objective counts and not by "
                "the tokens by which Megatron multiplies it; remove the key (moe_router_bias_update_rate balances "
                "routers that have a bias), or go on from the result of an earlier run with --continue-from"
            )


def _check_steps(recipe: Recipe, updates: int) -> None:
    """`UserError` unless stages, checkpoints and exports end with a whole step of ``updates`` updates.

    updates: `updates_per_step`, the updates that share one proximal policy.
    """
    cause = "schedule.sync_every" if updates == recipe.schedule.sync_every else "objective.proximal_updates"
    periods = {"schedule.updates_per_stage": recipe.schedule.updates_per_stage}
    periods["actor.checkpoint_every"] = recipe.actor.checkpoint_every
    # else trainers would wait for groups that only a version after updates of the same step may generate
    periods["schedule.sync_every"] = recipe.schedule.lag_rule.sync_every
    for name, value in periods.items():
        if value % updates:
            nearest = max(updates, round(value / updates) * updates)
            raise UserError(
                f"{cause} = {updates}: {updates} updates form a step, before which the log-probs of "
                f"its proximal policy are computed, but {name} = {value} would cut a step. Set {name} to a multiple of "
                f"{updates}, for example {nearest}"
            )


def check_devices(recipe: Recipe) -> None:
    """`UserError` if the actor's layers or kernels do not run on its backend, or there are too few GPUs."""
    actor = recipe.actor
    if actor.layers == "transformer_engine":
        if actor.backend == "cpu":
            raise UserError('[actor] layers = "transformer_engine" runs on GPUs only; use "torch" on backend = "cpu"')
        _check_transformer_engine()
    check_optimizer(recipe)
    _check_kernels(actor)
    if actor.backend == "cuda":
        builtin = any(table.engine == "builtin" for table in recipe.distinct_rollouts.values())
        if builtin and library.torch_needs_triton() and (lacks := library.triton_lacks()):
            raise UserError(f'[rollout] engine = "builtin": on GPUs torch runs a Triton kernel for it, but {lacks}')
        needed = recipe.devices_per_node
        if torch.cuda.device_count() < needed:
            raise UserError(
                f'[actor] backend = "cuda" needs {needed} GPUs, but torch sees {torch.cuda.device_count()} here; '
                'backend = "cpu" needs none'
            )
    deep_ep = recipe.megatron.get("moe_token_dispatcher_type") == "flex"
    if deep_ep and importlib.util.find_spec("deep_ep") is None:
        raise UserError(
            '[megatron] moe_token_dispatcher_type = "flex" needs the package deep_ep, built from '
            'github.com/deepseek-ai/DeepEP, tag v1.2.1, which is not installed; use "alltoall"'
        )


def _check_transformer_engine() -> None:
    """`UserError` if it is missing, or of a version that does not suit the installed Megatron-Core."""
    versions, whose = suitable_versions("transformer-engine")
    try:
        found = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            '[actor] layers = "transformer_engine", but it is not installed: '
            f"pip install --no-build-isolation 'transformer-engine[pytorch]{versions}'"
        ) from None
    if not versions.contains(found, prereleases=True):
        raise UserError(
            f'[actor] layers = "transformer_engine": version {found} is installed, but {whose} {versions}; use "torch"'
        )


def _check_kernels(actor: ActorTable) -> None:
    device, kernels = actor.backend, actor.kernel_backend
    runs_on = {"cpp": "cpu", "cuda": "cuda", "triton": "cuda"}
    if runs_on.get(kernels, device) != device:
        usable = [name for name in ("torch", *runs_on) if runs_on.get(name, device) == device]
        raise UserError(f"[actor] kernels = {kernels!r} do not run on backend = {device!r}; use {' or '.join(usable)}")
    if kernels in ("cpp", "cuda"):
        library.load_library(device)
    if actor.head_backend == "triton" and (lacks := library.triton_lacks()):
        raise UserError(f"[actor] kernels = {kernels!r}: {lacks}")
