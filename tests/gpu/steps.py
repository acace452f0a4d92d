"""The steps of `make gpu`: each is a process of its own, with a time limit and a check for what it needs."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Seconds for all steps of a group: the first two fit a machine that is lent for a quarter of an hour, one call each.
BUDGETS = {"first": 390, "numbers": 400, "engines": 600}
WITH_PYTEST = ("pytest",)


@dataclass(frozen=True)
class Step:
    name: str
    shows: str
    command: list[str]
    group: str = "first"
    limit: int = 240  # seconds
    beside: bool = False  # runs at the same time as the steps around it that do, too
    packages: tuple[str, ...] = ()  # that it needs, by their names in pip: an engine's CPU build has another name
    programs: tuple[str, ...] = ()

    def lacks(self) -> str | None:
        """The reason to skip the step, or None."""
        missing = [f"{name} not installed" for name in self.packages if not is_installed(name)]
        missing += [f"{name} not on PATH" for name in self.programs if not shutil.which(name)]
        return " and ".join(missing) or None


def is_installed(package: str) -> bool:
    return any(importlib.metadata.distributions(name=package))


def steps(out: Path, work: Path, gpus: int, small: bool) -> list[Step]:
    """All steps in order. out: folder of the results; work: removed at the end; small: sizes for a rehearsal."""

    python = [sys.executable, "-W", "ignore", "-m"]

    def module(name: str, *arguments: object) -> list[str]:
        return [*python, f"tests.gpu.{name}", *map(str, arguments), *["--small"] * small]

    def run(name: str) -> list[str]:
        return module("runs", name, "--work", work)

    def table(name: str, shows: str, limit: int) -> Step:
        return Step(name, shows, module("tables", name, "--out", out), "numbers", limit)

    def generate(engine: str) -> Step:
        shows = f"{engine}'s log-probs are those of the actor that exported the weights, for two policies"
        return Step(engine, shows, run(engine), "engines", 300, packages=(engine,))

    pytest = [*python, "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_gpu.py"]
    side_by_side = ["-n", "8"] * (is_installed("pytest-xdist") and not small)
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    return [
        Step("build", "nvcc compiles csrc/cuda", module("build"), limit=150, programs=("cmake", "nvcc")),
        Step("doctor", "what this machine has", [sys.executable, "-m", "megarl.cli", "doctor"], limit=60, beside=True),
        Step(
            "kernels",
            "CUDA and Triton kernels equal the definitions, give the same bits each time and never wait",
            [*pytest, *side_by_side, *(["-k", "cuda and (gspo or bapo)"] if small else [])],
            packages=WITH_PYTEST,
            beside=True,
        ),
        Step(
            "actor",
            "bf16 updates on the GPU equal float32 on the CPU, by kernels, layers and layouts",
            module("actor", "--gpus", gpus),
            packages=WITH_PYTEST,
            beside=True,
        ),
        Step(
            "quickstart",
            "a run from a prompt file is killed, resumes, and improves the policy; its engine's weights do not drift",
            run("quickstart"),
            limit=300,
            beside=True,
        ),
        Step(
            "live",
            "a live run whose trainer and engine take turns on one GPU is killed and resumes",
            run("live"),
            "engines",
            300,
        ),
        Step(
            "sanitizer",
            "a token pass with ragged segments touches no memory that is not its own",
            [*sanitizer, *pytest, "-k", "cuda and gspo"],
            limit=70,
            programs=("compute-sanitizer",),
        ),
        generate("vllm"),
        generate("sglang"),
        table("ceilings", "how fast this GPU copies and multiplies", 40),
        table("actor_gpu", "updates of layers of Qwen3's sizes: tokens per second, share of the GPU's arithmetic", 150),
        table("operators", "milliseconds of an update of Qwen3-30B-A3B's layers, by what its kernels do", 50),
        table("linear_logprob", "time of the lm head against materialised logits, Liger and Cut Cross-Entropy", 60),
        table("token_pass", "time of the fused token pass against eager torch and torch.compile", 120),
        table("selection", "time of batch statistics against sorting and the released loops", 50),
        table("weight_gradient", "time of experts' weight gradients, added by a kernel or by a product and a sum", 40),
        table("adam", "an optimizer's step on the device, and on the host by number of threads", 40),
    ]
