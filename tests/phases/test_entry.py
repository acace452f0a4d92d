"""What every process of a phase sets before its work begins."""

import os

import torch

from megarl.phases import entry
from megarl.recipe.load import load_recipe, override_recipe
from megarl.storage.run_dir import RunDir

HOST = [
    'actor.backend="cuda"',
    "megatron_optimizer.use_precision_aware_optimizer=true",
    "megatron_optimizer.optimizer_cpu_offload=true",
    "megatron_optimizer.optimizer_offload_fraction=1.0",
]


def test_a_trainer_with_adam_in_host_memory_has_its_share_of_the_cores(recipe, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "1")
    for phase in ("evaluate", "optimize"):
        monkeypatch.setattr(f"megarl.phases.{phase}.{phase}", lambda stage: None)
    plain = RunDir.create(tmp_path / "plain", load_recipe(recipe))
    host = RunDir.create(tmp_path / "host", override_recipe(load_recipe(recipe), HOST))
    starts = [(host, "optimize", 1), (host, "optimize", 8), (host, "optimize", 100)]
    for run, phase, ranks in [*starts, (plain, "optimize", 8), (host, "evaluate", 8)]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        entry._run(phase, run.root, 0)
    assert found == [64, 8, 1, 1, 1]
