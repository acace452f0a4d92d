"""What every process of a phase sets before its work begins."""

import json
import os
import subprocess
import sys

from megarl.recipe.load import load_recipe, override_recipe
from megarl.storage.run_dir import RunDir

HOST = [
    'actor.backend="cuda"',
    "megatron_optimizer.use_precision_aware_optimizer=true",
    "megatron_optimizer.optimizer_cpu_offload=true",
    "megatron_optimizer.optimizer_offload_fraction=1.0",
]
# the phases print torch's threads instead of doing their work, whose imports take seconds
SCRIPT = """
import json, os, sys, types
from pathlib import Path
import torch
from megarl.phases import entry
os.sched_getaffinity = lambda pid: set(range(64))
for phase in ("evaluate", "optimize"):
    module = types.SimpleNamespace(**{phase: lambda stage: print(torch.get_num_threads())})
    sys.modules[f"megarl.phases.{phase}"] = module
for run, phase, ranks in json.loads(sys.argv[1]):
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    assert entry.run_process(phase, Path(run), 0) == 0
"""


def threads(*starts):
    """Threads of torch for each (run, phase, ranks of the node), on a node with 64 cores."""
    starts = json.dumps([(str(run.root), phase, ranks) for run, phase, ranks in starts])
    command, environment = [sys.executable, "-c", SCRIPT, starts], os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return list(map(int, said.split()))


def test_a_trainer_with_adam_in_host_memory_has_its_share_of_the_cores(recipe, tmp_path):
    plain = RunDir.create(tmp_path / "plain", load_recipe(recipe))
    host = RunDir.create(tmp_path / "host", override_recipe(load_recipe(recipe), HOST))
    optimize = [(host, "optimize", 1), (host, "optimize", 8), (host, "optimize", 100)]
    others = [(plain, "optimize", 8), (host, "evaluate", 8)]
    assert threads(*optimize, *others) == [64, 8, 1, 1, 1]
