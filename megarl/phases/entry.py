"""The entry point of every process of a phase (see `megarl.workers.processes`), with its error handling."""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING, NoReturn

from megarl.errors import STOP_SIGNALS, PhaseFailed, UserError
from megarl.heartbeats import beat
from megarl.linux import die_with_parent, name_process
from megarl.own_file import raised_in
from megarl.phases import PHASES

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe
    from megarl.storage.run_dir import Stage

ERROR_FILE = "MEGARL_ERROR_FILE"  # environment variable: path of the JSON file to which a process writes its error
LOG = os.O_CREAT | os.O_WRONLY | os.O_APPEND


def become_phase(phase: str, run_dir: str, stage: int, log: str, environment: dict[str, str], end: str) -> NoReturn:
    """Run a phase in this new process of `multiprocessing`, and exit.

    log: the file for its output. environment: all its variables. end: the file to which it writes its exit code, since
    a fork server that dies cannot report it.
    """
    become(log, environment)
    name_process(f"{phase}:{os.environ['RANK']}")
    code = run_process(phase, Path(run_dir), stage)
    with contextlib.suppress(OSError):
        Path(end).write_text(str(code))
    sys.exit(code)


def become(log: str, environment: dict[str, str]) -> None:
    """Give this process a session of its own, ``environment``, default handlers of signals, and ``log`` for output.

    It dies with its parent, and its own forks, such as the writers of a checkpoint, with it.
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


def run_process(phase: str, run_dir: Path, stage: int) -> int:
    """Run a phase in this process; returns its exit code."""
    beat("imports", "")
    faulthandler.register(signal.SIGUSR1, file=2)  # writes the stacks to the log even if Python itself is blocked
    if PHASES[phase].saves:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # during the imports, until `StopRequest` handles them
    return report_errors(lambda: _run(phase, run_dir, stage))


def report_errors(function: Callable[[], None], into_log: bool = True) -> int:
    """Call ``function``; returns the exit code. An exception is printed and written to the error file.

    into_log: whether the output goes to a log of its own. If not, it goes to the terminal of the parent, which reads
    the error file and prints such a message itself, so that this process does not.
    """
    try:
        function()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            _write_error(end.code, mistake=False)
            return 1
        return end.code or 0
    except (UserError, PhaseFailed) as error:
        if into_log:
            print(error, file=sys.stderr)
        mistake = isinstance(error, UserError)
        _write_error(str(error), mistake)
        return 2 if mistake else 1
    except BaseException as error:
        traceback.print_exc()
        of_user = raised_in(error)
        _write_error(of_user or f"{type(error).__name__}: {error}", mistake=of_user is not None)
        return 2 if of_user else 1
    return 0


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


def _write_error(message: str, mistake: bool) -> None:
    """Write the error file, which the launcher reads. On a full disk it may be missing or incomplete."""
    if path := os.environ.get(ERROR_FILE):
        try:
            Path(path).write_text(json.dumps({"message": message, "mistake": mistake, "time": time.time()}))
        except OSError as error:
            print(f"cannot write {path}: {error}", file=sys.stderr)
