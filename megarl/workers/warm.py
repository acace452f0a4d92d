"""``python -m megarl.workers.warm FD``: the warm process, which imports what phases need and forks their processes.

Importing takes seconds, a fork milliseconds. The node agent (`megarl.workers.processes`) sends orders as JSON lines
through the socket FD:

- ``{"prepare": RUN_DIR}``: import what the run will need, between other orders.
- ``{"start": [process, ...]}``: fork the processes; ``{"check": RECIPE, ...}`` as the only one checks a recipe. The
  answers are ``{"started": [pid, ...]}`` and, as each process ends, ``{"ended": pid, "code": exit code}``.
- ``{"started": true}``: a phase was started without this process; import what training needs, too.

It never initialises CUDA, since forks could not use CUDA then. Its imports start no thread except that of Arrow's
jemalloc, which survives a fork. It dies with the agent, and its forks die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import sys
import tomllib
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import STOP_SIGNALS
from megarl.linux import die_with_parent, name_process
from megarl.phases import PHASES
from megarl.phases.entry import hide_gpus_from_cpu_runs, report_errors, run_process
from megarl.workers.processes import CANNOT_FORK

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe

# an order waits for the import in progress, so Megatron's, of 1.5 s, is done in parts; some torch versions lack one
SLOW_PARTS_OF_MEGATRON = (
    "torch.distributed.checkpoint",
    "torch._functorch.aot_autograd",
    "torch._inductor.decomposition",
    "torch._inductor.kernel.flex",
    "megatron.core",
)


class WarmProcess:
    """Carries out the agent's orders, and imports while there are none.

    warning_filters: `warnings.filters` of the forked processes; this process itself ignores all warnings.
    """

    def __init__(self, agent: socket.socket, warning_filters: Sequence[Any] = ()) -> None:
        self.warnings = list(warning_filters)
        self.agent = agent
        self.agent.setblocking(False)
        self.received = b""
        self.children: set[int] = set()
        self.generation: Iterator[None] = import_generation()  # remaining imports for rollouts and evaluations
        self.training: Iterator[None] = iter(())  # remaining imports for updates
        self.recipe: Recipe | None = None  # the recipe that decided on these imports
        self.started = False  # a phase runs: usually the first one generates, so training is imported during it
        signal.signal(signal.SIGCHLD, self._reap)  # also interrupts an import
        # Python runs that handler between two bytecode instructions: a signal that arrives just before `select` blocks
        # would not be handled until the agent's next order. So each signal also makes this socket readable
        self.signalled, writer = socket.socketpair()
        for end in (self.signalled, writer):
            end.setblocking(False)
        self._signal_writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Run until the agent closes its end of the socket."""
        busy = True
        while True:
            ready, _, _ = select.select([self.agent, self.signalled], [], [], 0 if busy else None)
            if self.signalled in ready:
                self.signalled.recv(1 << 16)
            if self.agent in ready and not self._receive():
                return
            busy = advance(self.generation) or (self.started and advance(self.training))

    def _receive(self) -> bool:
        try:
            data = self.agent.recv(1 << 16)
        except BlockingIOError:
            return True
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "started" in order:
                self.started = True
            elif "prepare" in order:
                self._prepare(recipe_of_run(Path(order["prepare"])))
            else:
                self._send({"started": self._start(order["start"])})
        return bool(data)

    def _prepare(self, recipe: Recipe) -> None:
        if recipe != self.recipe:
            generation, self.training = imports_of(recipe)
            self.recipe, self.generation = recipe, itertools.chain(self.generation, generation)

    def _start(self, processes: list[dict[str, Any]]) -> list[int]:
        deque(self.generation, maxlen=0)
        if "check" in processes[0]:
            recipe = parse(processes[0]["check"])
            deque(import_prompts(recipe), maxlen=0)
            self._prepare(recipe)  # already during the check, which most recipes pass
            return [self._fork(process) for process in processes]
        if (
            phase := PHASES.get(processes[0].get("phase", ""))
        ) and phase.actor:  # import once here instead of once in each process
            deque(self.training, maxlen=0)
        import torch

        if torch.cuda.is_initialized():
            sys.exit(CANNOT_FORK)
        gc.freeze()  # imported objects stay: collections in forks need not traverse them, which would copy their pages
        self.started = True
        return [self._fork(process) for process in processes]

    def _fork(self, process: dict[str, Any]) -> int:
        # blocked until the child's id is in `children`: `_reap` would miss a child that ends before
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if pid := os.fork():
            self.children.add(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for end in (self.agent, self.signalled, self._signal_writer):
                end.close()
            code = self.run_child(process)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # without the cleanup handlers that were inherited from the warm process

    def run_child(self, process: dict[str, Any]) -> int:
        """Run in the fork: set up session, log and environment, then run the phase. Returns the exit code."""
        gc.enable()
        warnings.filters[:] = self.warnings  # type: ignore[index]
        if "check" in process:
            return run_check(**process)
        become(process["log"], process["environment"])
        name_process(f"{process['phase']}:{os.environ['RANK']}")
        return run_process(process["phase"], Path(process["run"]), process["stage"])

    def _reap(self, *_: object) -> None:
        """Handler of SIGCHLD: report the children that have ended to the agent."""
        with sigchld_blocked():  # a second SIGCHLD must not interrupt this handler
            for pid in list(self.children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.children.remove(pid)
                    self._send({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, answer: dict[str, Any]) -> None:
        with sigchld_blocked():  # `_reap` would write its answer into the middle of this one
            self.agent.setblocking(True)
            try:
                self.agent.sendall(json.dumps(answer).encode() + b"\n")
            finally:
                self.agent.setblocking(False)


def run_check(check: str, nodes: int, optimizes: bool, environment: dict[str, str]) -> int:
    """Run `megarl.workers.preflight.check_recipe` in a fork, whose output goes where the agent's goes."""
    from megarl.workers.preflight import check_recipe

    os.environ |= environment
    recipe = parse(check)
    hide_gpus_from_cpu_runs(recipe.actor.backend)
    return report_errors(lambda: check_recipe(recipe, nodes, optimizes), into_log=False)


def parse(recipe: str) -> Recipe:
    from megarl.recipe.load import parse_recipe

    return parse_recipe(tomllib.loads(recipe))


@contextlib.contextmanager
def sigchld_blocked() -> Iterator[None]:
    """Inside the context the handler of SIGCHLD does not run; it runs afterwards if a child has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become(log: str, environment: dict[str, str]) -> None:
    """Give a fork what a new process would have: a session, output to ``log``, environment, default signal handlers."""
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ |= environment
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def advance(imports: Iterator[None]) -> bool:
    """Do the next import; False when all are done."""
    return next(imports, True) is None


def import_generation() -> Iterator[None]:
    """Import, step by step, what engines and verifiers need with any recipe."""
    yield from import_modules("torch", "torch.distributed", "transformers")
    import transformers

    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):  # transformers imports them on first access
        getattr(transformers, name)
        yield
    yield from import_phases(actor=False)


def recipe_of_run(run_dir: Path) -> Recipe:
    from megarl.storage.run_dir import RunDir

    return RunDir.open(run_dir).recipe


def imports_of(recipe: Recipe) -> tuple[Iterator[None], Iterator[None]]:
    """The further imports that the recipe needs, step by step: (for generation, for training)."""
    hide_gpus_from_cpu_runs(recipe.actor.backend)
    training = ["megarl.actor"]
    if recipe.actor.backend == "cpu":
        training += ["megarl.actor.cpu_backend"]
    if recipe.run.tensorboard:
        training += ["torch.utils.tensorboard"]
    engine = import_builtin_engine(recipe.model.path) if recipe.rollout.engine == "builtin" else iter(())
    generation = itertools.chain(import_prompts(recipe), open_prompts(recipe), engine)
    return generation, itertools.chain(import_megatron(), import_modules(*training), import_phases(actor=True))


def import_prompts(recipe: Recipe) -> Iterator[None]:
    """Import the packages that generate the recipe's prompts."""
    if any(table.source == "reasoning_gym" for table in recipe.data.mixture):
        from megarl.data.sources import import_reasoning_gym

        import_reasoning_gym()
        yield


def open_prompts(recipe: Recipe) -> Iterator[None]:
    """Open the prompts, so that phases inherit them and need not read or generate them again."""
    from megarl.data.prompts import open_prompts

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive a fork
    with contextlib.suppress(Exception):  # the check of the recipe meets the same error and reports it
        open_prompts(recipe, recipe.model.tokenizer_path)
    yield


def import_builtin_engine(model: Path) -> Iterator[None]:
    """Import the engine and transformers' class of the model; compile the weight names that `from_pretrained` uses."""
    yield from import_modules("megarl.rollout.builtin")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    with contextlib.suppress(Exception):  # the check of the recipe meets the same error and reports it
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        AutoModelForCausalLM._model_mapping[type(config)]
        yield
        get_checkpoint_conversion_mapping(config.model_type)
        yield


def import_modules(*names: str) -> Iterator[None]:
    for name in names:
        importlib.import_module(name)
        yield


def import_phases(actor: bool) -> Iterator[None]:
    """Import the phases to which training runs come, those with an actor or those without."""
    yield from import_modules(*(phase.module for phase in PHASES.values() if phase.ahead and phase.actor == actor))


def import_megatron() -> Iterator[None]:
    for name in SLOW_PARTS_OF_MEGATRON:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
        yield


def serve(agent: socket.socket) -> None:
    """Set up the warm process and carry out the orders of the node agent, until that closes the socket or dies."""
    for number in STOP_SIGNALS:  # a scheduler signals every process of a job, but the agent decides what ends
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(os.environ["MEGARL_AGENT_PID"]))
    name_process("warm:")
    gc.disable()  # imports make no garbage worth collecting
    filters = warnings.filters[:]
    warnings.simplefilter("ignore")  # warnings during imports would be printed into the agent's progress display
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    WarmProcess(agent, filters).serve()


if __name__ == "__main__":
    os.register_at_fork(after_in_child=die_with_parent)
    serve(socket.socket(fileno=int(sys.argv[1])))
