"""The steps of `make gpu`: each is a process of its own, with a time limit and a check for what it needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGETS = {"checks": 480, "benchmarks": 600}  # seconds for all steps of a group


@dataclass(frozen=True)
class Step:
    name: str
    shows: str
    command: list[str]
    group: str = "checks"
    limit: int = 240  # seconds
    lacks: Callable[[], str | None] = lambda: None  # returns the reason to skip the step, or None


def package(*names: str) -> Callable[[], str | None]:
    """A `Step.lacks` for packages, by the names with which Python imports them."""

    def lacks() -> str | None:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        return f"{' and '.join(missing)} not installed" if missing else None

    return lacks


def distribution(name: str) -> Callable[[], str | None]:
    """A `Step.lacks` for a package by its name in pip: an engine's CPU build has another name and the same modules."""

    def lacks() -> str | None:
        found = any(True for _ in importlib.metadata.distributions(name=name))
        return None if found else f"{name} not installed"

    return lacks


def programs(*names: str) -> Callable[[], str | None]:
    """A `Step.lacks` for programs on PATH."""

    def lacks() -> str | None:
        missing = [name for name in names if shutil.which(name) is None]
        return f"no {' and no '.join(missing)} on PATH" if missing else None

    return lacks


def steps(out: Path, work: Path, gpus: int, small: bool) -> list[Step]:
    """All steps in order. out: folder of the results; work: removed at the end; small: sizes for a rehearsal."""

    def module(name: str, *arguments: object) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", f"tests.gpu.{name}", *map(str, arguments), *["--small"] * small]

    def table(name: str, shows: str, limit: int = 240) -> Step:
        return Step(name, shows, module("tables", name, "--out", out), "benchmarks", limit)

    def generate(engine: str) -> Step:
        command = module("runs", "engine", "--engine", engine, "--work", work)
        shows = f"{engine}'s log-probs are those of the actor that exported the weights, for two policies"
        return Step(engine, shows, command, limit=300, lacks=distribution(engine))

    pytest = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    some = ["-k", "cuda and (gspo or bapo)"] if small else []
    return [
        Step("doctor", "what this machine has", [sys.executable, "-m", "megarl.cli", "doctor"], limit=60),
        Step("build", "nvcc compiles csrc/cuda", module("build"), lacks=programs("cmake", "nvcc")),
        Step(
            "kernels",
            "CUDA and Triton kernels equal the definitions, give the same bits each time and never wait",
            [*pytest, "tests/kernels/test_gpu.py", *some],
            lacks=package("pytest"),
        ),
        Step(
            "actor",
            "bf16 updates on the GPU equal float32 on the CPU, by kernels, layers and layouts",
            module("actor", "--gpus", gpus),
            limit=200,
            lacks=package("pytest"),
        ),
        Step(
            "quickstart",
            "a run from a prompt file is killed, resumes, and improves the policy; its engine's weights do not drift",
            module("runs", "quickstart", "--work", work),
            limit=300,
        ),
        generate("vllm"),
        generate("sglang"),
        table("ceilings", "how fast this GPU copies and multiplies", 60),
        table("token_pass", "time of the fused token pass against eager torch and torch.compile"),
        table("selection", "time of batch statistics against sorting and the released loops"),
        table("linear_logprob", "time of the lm head against materialised logits, Liger and Cut Cross-Entropy"),
        table("actor_gpu", "updates of layers of Qwen3's sizes: tokens per second, share of the GPU's arithmetic"),
    ]
