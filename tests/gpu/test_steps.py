"""`make gpu`: steps that fail, hang, crash or cannot run, and most of its steps on the rehearsal device."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.gpu import __main__ as gpu
from tests.gpu.steps import BUDGETS, Step, steps
from tests.helpers import ROOT
from tests.rehearsal.build import build

REHEARSED = ("doctor", "build", "kernels", "actor", "quickstart", "live", "sanitizer", "vllm")
REHEARSED += ("ceilings", "actor_gpu", "linear_logprob", "token_pass", "selection", "weight_gradient", "adam")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def outcomes(out: Path) -> dict[str, str]:
    page = (out / "summary.md").read_text().partition("## ")[0]
    return dict(re.findall(r"(?m)^\| (\w+) \| .* \| ([^|]+) \| \d+ \|$", page))


def test_a_step_that_fails_does_not_affect_the_others(tmp_path, monkeypatch):
    monkeypatch.setitem(BUDGETS, "numbers", 0)
    child = tmp_path / "child"
    hanging = ["sh", "-c", f"sleep 600 & echo $! > {child}; sleep 600"]
    chosen = [
        Step("fails", "", python("raise SystemExit('the planted reason')")),
        Step("crashes", "", python("import os; os.kill(os.getpid(), 11)")),
        Step("hangs", "", hanging, limit=5),
        Step("lacks", "", python("raise SystemExit(1)"), packages=("pytest", "no-such-package"), programs=("no-such",)),
        Step("late", "", python("raise SystemExit(1)"), group="numbers"),
        Step("works", "", python("print('a figure')")),
    ]
    results = gpu.run_steps(chosen, tmp_path, lambda result: None)
    assert outcomes(tmp_path) == {
        "fails": "failed: exit code 1",
        "crashes": "failed: exit code -11",
        "hangs": "over its limit: 5 s",
        "lacks": "skipped: no-such-package not installed and no-such not on PATH",
        "late": "skipped: the 0 s of all of numbers are used up",
        "works": "passed",
    }
    assert [result.name for result in results if result.failed] == ["fails", "crashes", "hangs"]
    page = (tmp_path / "summary.md").read_text()
    assert "the planted reason" in page and "a figure" in page and "Not begun" not in page
    pid = int(child.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # the step's process group has been sent a SIGKILL, which may take a moment


def test_without_a_gpu_the_error_is_one_line(tmp_path):
    command = [sys.executable, "-m", "tests.gpu"]
    environment = os.environ | {"OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stdout == "" and done.stderr.startswith("no GPU to test: torch") and done.stderr.count("\n") == 1


def test_steps_pass_on_the_rehearsal_device(tmp_path):
    """As if reasoning-gym and vLLM were not installed: their import fails. Figures of such small sizes mean nothing."""
    build()
    for name in ("reasoning_gym", "vllm"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('it is not installed')")
    path = os.pathsep.join([str(ROOT / "tests/rehearsal/site"), str(tmp_path)])
    out = tmp_path / "out"
    environment = {"PYTHONPATH": path, "OUT": str(out), "TRITON_INTERPRET": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu", "--small", *REHEARSED]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    log = (out / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    expected = dict.fromkeys(REHEARSED, "passed") | {"vllm": "skipped: vllm not installed"}
    assert outcomes(out) == expected | {"sanitizer": "skipped: compute-sanitizer not on PATH"}
    left_out = {step.name for step in steps(out, tmp_path, 1, small=True)} - set(REHEARSED)
    assert left_out == {"sglang", "operators"}  # torch's profiler is too slow with so many calls on the host
    page = (out / "summary.md").read_text()
    assert "- gpu: 8 x rehearsal H100" in page and "- megatron-core: 0.16.1" in page
    assert "| tiny | torch, cuda |" in page and "transformer_engine is not installed" in page
    assert "kernels cuda        right:" in page and "transformer_engine  skipped: " in page
    assert "held-out accuracy by stage" in page and "nats in the mean of" in page
    assert "continuing" in page.partition("What quickstart said")[2]  # it was killed before
    with open(out / "actor_gpu.csv", newline="") as file:
        *measured, skipped = csv.DictReader(file)
    assert all(float(row["tokens a second"]) > 0 for row in measured) and skipped["tokens a second"] == "not measured"
