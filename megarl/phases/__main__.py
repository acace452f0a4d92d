"""``python -m megarl.phases PHASE RUN_DIR STAGE``: one process of a phase, started by the launcher."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path

from megarl.errors import STOP_SIGNALS

PR_SET_PDEATHSIG = 1


def die_with_agent() -> None:
    """Have the kernel kill this process when its node agent dies, however it dies: no orphan ever writes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["MEGARL_AGENT_PID"]):
        os.kill(os.getpid(), signal.SIGKILL)  # it died before the line above


def die_with_parent() -> None:
    """The same for what a library forks, such as the writers of a checkpoint: the request is not inherited."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run ``megarl.phases.<phase>.<phase>(run, stage)``; errors reach the launcher through torch's error file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=["rollout", "optimize", "live", "evaluate"])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("stage", type=int)
    arguments = parser.parse_args()
    if arguments.phase != "evaluate":  # which has nothing to save
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until `StopRequest`, through the imports

    # a look at the GPUs must not initialise CUDA: engines choose theirs through CUDA_VISIBLE_DEVICES
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    record(_run)(arguments.phase, arguments.run_dir, arguments.stage)


def _run(name: str, run_dir: Path, stage: int) -> None:
    import torch.distributed as dist

    from megarl.errors import UserError
    from megarl.storage.run_dir import RunDir

    phase = getattr(importlib.import_module(f"megarl.phases.{name}"), name)
    try:
        phase(RunDir.open(run_dir), stage)
    except UserError as error:
        print(error, file=sys.stderr)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.dup2(2, 1)  # one log
    die_with_agent()  # before the seconds that imports take
    os.register_at_fork(after_in_child=die_with_parent)
    main()
