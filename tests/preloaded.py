"""Imported by the fork server of the tests alone: what runs of the tests need, beyond what all runs need."""

import gc
import importlib
import os
import warnings

os.environ.pop("MEGARL_PRELOAD", None)  # else the next import would begin with a run's imports

from megarl.phases.preload import become_server

OTHERS = ("torch.distributed", "transformers.models.qwen3_moe", "reasoning_gym", "plotly.graph_objects", "rich.live")
NAMES = (
    *("cli", "workers.launcher", "commands.train", "commands.one_phase", "commands.evaluate", "planner.preflight"),
    *("rollout.builtin", "phases.optimize", "phases.rollout", "actor.cpu_backend", "phases.live.trainer"),
)

os.environ["CUDA_VISIBLE_DEVICES"] = ""
become_server(os.getppid())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (*OTHERS, *(f"megarl.{name}" for name in NAMES), "tests.zygote"):
        importlib.import_module(name)
gc.freeze()
