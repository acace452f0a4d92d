"""Starts a phase: a fresh set of processes under torch elastic, which brings rendezvous, restarts and error files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
import time

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megarl.errors import PhaseFailed, UserError
from megarl.files import no_space_left
from megarl.run_dir import RunDir

logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_explain` says it better
NEARLY_FULL = 1 << 20  # bytes
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run_phase(run: RunDir, phase: str, stage: int, processes: int) -> None:
    """Run ``megarl.phases.<phase>`` for ``stage`` on this machine to its end, and record both in events.jsonl."""
    logs = run.logs / f"{stage:03d}_{phase}"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    os.environ["MEGARL_AGENT_PID"] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the agent's own would listen on every interface
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"{phase}{stage}",
        rdzv_backend="c10d",
        rdzv_endpoint=str(logs / "rendezvous"),  # a file: nothing listens
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=run.recipe.run.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(str(logs), redirects=Std.ALL),
    )
    run.log_event("phase_start", phase=phase, stage=stage, processes=processes)
    start = time.monotonic()
    ours = {number: signal.getsignal(number) for number in STOP_SIGNALS}  # elastic installs its own and leaves them
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "megarl.phases", phase, str(run.root), str(stage))
    except ChildFailedError as error:
        run.log_event("phase_failed", phase=phase, stage=stage, seconds=round(time.monotonic() - start, 3))
        raise _explain(error, run, phase, stage) from None
    except SignalException as error:
        run.log_event("phase_stopped", phase=phase, stage=stage, seconds=round(time.monotonic() - start, 3))
        raise KeyboardInterrupt from error
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    run.log_event("phase_end", phase=phase, stage=stage, seconds=round(time.monotonic() - start, 3))


def _explain(error: ChildFailedError, run: RunDir, phase: str, stage: int) -> Exception:
    """What a person needs of the first failure: a `UserError`'s own words, or cause, traceback and log."""
    rank, failure = error.get_first_failure()
    message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    if isinstance(message, dict):
        message = message.get("message", str(message))
    if message.startswith("UserError: "):
        return UserError(message.removeprefix("UserError: "))
    logs = sorted((run.logs / f"{stage:03d}_{phase}").glob(f"*/*/{failure.local_rank}/stderr.log"))
    text = logs[-1].read_text(errors="replace") if logs else ""
    # libraries wrap the error of a full disk, and on one not even the error file may fit
    known = failure.error_file not in ("", "<N/A>")
    full = shutil.disk_usage(run.root).free < NEARLY_FULL
    if os.strerror(errno.ENOSPC) in message + text or (full and not known):
        return no_space_left(run.root)
    cause = f"killed by signal {-failure.exitcode}" if failure.exitcode < 0 else message if known else "died"
    tail = "\n".join(text.splitlines()[-15:])
    return PhaseFailed(f"{phase} of stage {stage}, rank {rank}: {cause}\n{tail}\nfull log: {logs and logs[-1]}")
