"""What the fork server of `multiprocessing` imports before its first fork, so that phases need not: that takes seconds.

The server of a run is started by `megarl.workers.processes`, which says through the environment what to import. Its
imports start no thread except that of Arrow's jemalloc, which survives a fork. It dies with the node agent, and its
forks die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import STOP_SIGNALS
from megarl.linux import die_with_parent, name_process
from megarl.phases import PHASES
from megarl.phases.entry import hide_gpus_from_cpu_runs

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe

ORDER = "MEGARL_PRELOAD"  # environment variable: see `order`
SERVER_NAME = "fork server"  # as `ps` shows it


def order(recipe: Recipe, trains: bool) -> str:
    """The value of `ORDER` in the environment of a fork server. trains: with the phases that train."""
    return json.dumps({"agent": os.getpid(), "recipe": recipe.model_dump_json(), "trains": trains})


def preload(agent: int, recipe: str, trains: bool) -> None:
    """Import what phases of the recipe need into this process, a fork server of the node agent's."""
    become_server(agent)
    from megarl.recipe.tables import Recipe

    with warnings.catch_warnings(), contextlib.suppress(Exception):  # a process that imports the same shows the error
        warnings.simplefilter("ignore")  # they would be printed into the agent's progress display
        _import_all(Recipe.model_validate_json(recipe), trains)
    gc.freeze()  # imported objects stay: collections in forks need not traverse them, which would copy their pages


def become_server(agent: int) -> None:
    """Have this process outlive a scheduler's signals, but not the node agent."""
    for number in STOP_SIGNALS:  # a scheduler signals every process of a job, but the agent decides what ends
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # so those to a fork wait until it handles them
    die_with_parent(agent)
    os.register_at_fork(after_in_child=die_with_parent)
    name_process(SERVER_NAME)
    os.setsid()
    gc.disable()  # imports make no garbage worth collecting
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def _import_all(recipe: Recipe, trains: bool) -> None:
    hide_gpus_from_cpu_runs(recipe.actor.backend)
    for name in _modules(recipe, trains):
        importlib.import_module(name)
    from megarl.data.prompts import open_prompts

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive a fork
    with contextlib.suppress(Exception):  # the check of the recipe meets the same error and reports it
        open_prompts(recipe, recipe.model.tokenizer_path)  # phases inherit them, and need not read or generate them
    if recipe.rollout.engine == "builtin":
        _import_builtin_engine(recipe.model.path)


def _modules(recipe: Recipe, trains: bool) -> Iterator[str]:
    yield from ("torch", "torch.distributed", "transformers", "megarl.data.prompts")
    if any(table.source == "reasoning_gym" for table in recipe.data.mixture):
        yield "reasoning_gym"
    # Megarl's processes on GPUs are new interpreters, since what the actor imports may initialise CUDA
    if trains := trains and recipe.actor.backend == "cpu":
        yield from ("megarl.actor", "megarl.actor.cpu_backend")
    if trains and recipe.run.tensorboard:
        yield "torch.utils.tensorboard"
    phases = (PHASES[name] for name in (*recipe.schedule.phases, "evaluate"))
    yield from (phase.module for phase in phases if trains or not phase.actor)


def _import_builtin_engine(model: Path) -> None:
    """Import the engine and transformers' class of the model; compile the weight names that `from_pretrained` uses."""
    importlib.import_module("megarl.rollout.builtin")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - imported on first access
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    AutoModelForCausalLM._model_mapping[type(config)]
    get_checkpoint_conversion_mapping(config.model_type)


if ORDER in os.environ:  # this import is that of a fork server
    preload(**json.loads(os.environ.pop(ORDER)))
