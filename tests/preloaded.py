"""Imported by the fork server of the tests alone: what runs of the tests need, beyond what all runs need."""

import gc
import importlib
import os
import warnings

os.environ.pop("MEGARL_PRELOAD", None)  # else the next import would begin with a run's imports

from megarl.phases.preload import become_server

NAMES = (
    "torch.distributed",
    "transformers.models.qwen3_moe",
    "megarl.cli",
    "megarl.workers.launcher",
    "megarl.commands.train",
    "megarl.commands.one_phase",
    "megarl.commands.evaluate",
    "megarl.planner.preflight",
    "reasoning_gym",
    "megarl.rollout.builtin",
    "megarl.phases.optimize",
    "megarl.phases.rollout",
    "megarl.actor.cpu_backend",
    "megarl.phases.live.trainer",
    "plotly.graph_objects",
    "rich.live",
    "tests.zygote",
)

os.environ["CUDA_VISIBLE_DEVICES"] = ""
become_server(os.getppid())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in NAMES:
        importlib.import_module(name)
gc.freeze()
