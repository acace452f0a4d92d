"""The entry point of every process of a phase (see `megarl.workers.processes`), with its error handling."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megarl.errors import STOP_SIGNALS, PhaseFailed, UserError
from megarl.heartbeats import beat
from megarl.linux import die_with_parent, name_process
from megarl.own_file import raised_in
from megarl.phases import PHASES

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe
    from megarl.storage.run_dir import Stage

LOG = os.O_CREAT | os.O_WRONLY | os.O_APPEND


def become_phase(phase: str, run_dir: Path, stage: int, log: Path, environment: dict[str, str], end: Path) -> NoReturn:
    """Run a phase in this new process of `multiprocessing`, and exit.

    log: the file for its output. environment: all its variables. end: as in `report_end`.
    """
    become(log, environment)
    name_process(f"{phase}:{os.environ['RANK']}")
    beat("imports", "")
    faulthandler.register(signal.SIGUSR1, file=2)  # writes the stacks to the log even if Python itself is blocked
    if PHASES[phase].saves:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # during the imports, until `StopRequest` handles them
    sys.exit(report_end(lambda: _run(phase, run_dir, stage), end))


def become(log: Path, environment: dict[str, str]) -> None:
    """Give this process a session of its own, ``environment``, default handlers of signals, and ``log`` for output.

    It dies with its parent, and its own forks with it.
    """
    os.setsid()
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    os.register_at_fork(after_in_child=die_with_parent)
    gc.enable()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent has blocked stop signals until here
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, LOG), (2, log, LOG)):
        os.dup2(file := os.open(path, flags, 0o666), descriptor)
        os.close(file)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)


def report_end(function: Callable[[], None], end: Path, into_log: bool = True) -> int:
    """Call ``function``; returns the exit code. An exception is printed.

    end: the file to which the exit code, which a fork server that dies cannot report, and the message of an exception
    are written, for `read_end`.
    into_log: whether the output goes to a log of its own. If not, it goes to the terminal of the parent, which reads
    the message of a `UserError` or `PhaseFailed` and prints it itself, so that this process does not.
    """
    code, message = 0, ""
    try:
        function()
    except SystemExit as leave:
        if isinstance(leave.code, int | None):
            code = leave.code or 0
        else:
            code, message = 1, str(leave.code)
            print(message, file=sys.stderr)
    except (UserError, PhaseFailed) as error:
        code, message = 2 if isinstance(error, UserError) else 1, str(error)
        if into_log:
            print(message, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        of_user = raised_in(error)
        code, message = 2 if of_user else 1, of_user or f"{type(error).__name__}: {error}"
    mistake = code == 2 and message != ""  # else a library has chosen the code
    try:
        end.write_text(json.dumps({"code": code, "message": message, "mistake": mistake, "time": time.time()}))
    except OSError as error:
        print(f"cannot write {end}: {error}", file=sys.stderr)
    return code


def read_end(end: Path) -> dict[str, Any]:
    """What `report_end` has written: code, message, mistake, time. The code is None if it could not write."""
    try:
        return dict(json.loads(end.read_text()))
    except (OSError, ValueError):  # killed, or written on a full disk
        return {"code": None, "message": "", "mistake": False, "time": time.time()}


def _run(phase: str, run_dir: Path, stage: int) -> None:
    # torch.cuda.is_available() must not initialise CUDA: engines still have to set CUDA_VISIBLE_DEVICES
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from megarl.storage.run_dir import RunDir

    run = RunDir.open(run_dir)
    hide_gpus_from_cpu_runs(run.recipe.actor.backend)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(_threads(run.recipe, phase))
    function: Callable[[Stage], None] = getattr(importlib.import_module(PHASES[phase].module), phase)
    function(run.stage(stage))
    if dist.is_initialized():
        dist.destroy_process_group()


def _threads(recipe: Recipe, phase: str) -> int:
    """Threads of torch on the host: a trainer with Adam in host memory has its share of the node's cores."""
    from megarl.recipe.optimizer import offloaded

    if PHASES[phase].actor and offloaded(recipe):
        return max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))
    return int(os.environ["OMP_NUM_THREADS"])


def hide_gpus_from_cpu_runs(backend: str) -> None:
    """With backend "cpu", make megarl and Megatron see no GPUs; call it before anything initialises CUDA."""
    if backend == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
