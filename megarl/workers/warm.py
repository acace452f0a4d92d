"""``python -m megarl.workers.warm FD``: the warm process, which imports what phases need and forks their processes.

Importing takes seconds, a fork milliseconds. Between the orders that the node agent (`megarl.workers.processes`) sends
through the socket FD, it goes on importing, so that a run does not wait for what only a later phase needs. (The fork
server of `multiprocessing` has to be told before its start what to import, and imports all of it before the first
fork; it also ends at a scheduler's SIGTERM, and its forks with it.)

It never initialises CUDA, since forks could not use CUDA then. Its imports start no thread except that of Arrow's
jemalloc, which survives a fork. It dies with the agent, and its forks die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import STOP_SIGNALS
from megarl.linux import die_with_parent, name_process
from megarl.phases import PHASES
from megarl.phases.entry import hide_gpus_from_cpu_runs, run_process

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe

LAST_WORDS = struct.Struct("ii")  # process id and exit code, so short that writes to a pipe do not mix
POLL_SECONDS = 0.005  # between two looks whether forks have ended
CHECK, GENERATION, TRAINING = range(3)  # levels of imports: what the recipe's check needs, phases with engines, others
# an order waits for the import in progress, so Megatron's, of 1.5 s, is done in parts; some torch versions lack one
SLOW_PARTS_OF_MEGATRON = (
    "torch.distributed.checkpoint",
    "torch._functorch.aot_autograd",
    "torch._inductor.decomposition",
    "torch._inductor.kernel.flex",
)

Call = tuple[Callable[..., int], tuple[Any, ...]]  # what a fork runs: a function, which returns the exit code


class Imports:
    """The imports that remain to be done, level by level; each step of an iterator is one import."""

    def __init__(self, first: Iterator[None]) -> None:
        self._levels: list[Iterator[None]] = [first, iter(()), iter(())]
        self._recipe: Recipe | None = None
        self.failed = False  # whether one of them raised an exception

    def prepare(self, recipe: Recipe) -> None:
        """Add what a recipe needs, unless it is the same recipe as before."""
        if recipe != self._recipe:
            self._recipe = recipe
            further = imports_of(recipe)
            self._levels = [itertools.chain(*both) for both in zip(self._levels, further, strict=True)]

    def advance(self, level: int) -> bool:
        """Do the next import up to this level; False if there is none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they would be printed into the agent's progress display
            try:
                return any(next(steps, True) is None for steps in self._levels[: level + 1])
            except Exception:  # a process that is started cold imports the same and shows the error
                self.failed = True
                return True


def serve(agent: Connection, imports: Imports) -> None:
    """Carry out the agent's orders, and import while there are none, until the agent closes the connection.

    Orders are ("prepare", recipe); ("started",): a phase was started without this process; and ("fork", level, calls),
    which is answered by ("forked", process ids), None instead of these if forks could not use CUDA or an import failed,
    and by ("ended", process id, exit code) as each of them ends. Forks themselves write `LAST_WORDS`, in case that this
    process dies before it reports an end; the agent first sends the descriptor for it.
    """
    last_words = recv_handle(agent)
    os.set_inheritable(last_words, False)
    children: set[int] = set()
    level = GENERATION  # training is imported once a phase runs: usually the first one generates
    while True:
        busy = imports.advance(level)
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                agent.send(("ended", pid, os.waitstatus_to_exitcode(status)))
        if not agent.poll(0 if busy else POLL_SECONDS if children else None):
            continue
        try:
            order, *arguments = agent.recv()
        except EOFError:
            return
        if order == "prepare":
            imports.prepare(*arguments)
        elif order == "started":
            level = TRAINING
        else:
            needed, calls = arguments
            while imports.advance(needed):  # here once, instead of in each fork
                pass
            if needed > CHECK:
                level = TRAINING
            pids = None if imports.failed else _fork_all(agent, last_words, calls)
            children.update(pids or ())
            agent.send(("forked", pids))


def _fork_all(agent: Connection, last_words: int, calls: list[Call]) -> list[int] | None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return None
    gc.freeze()  # imported objects stay: collections in forks need not traverse them, which would copy their pages
    return [_fork(agent, last_words, *call) for call in calls]


def _fork(agent: Connection, last_words: int, function: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        agent.close()
        gc.enable()
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(last_words, LAST_WORDS.pack(os.getpid(), code))
        os._exit(code)  # without the cleanup handlers that were inherited from the warm process


def run_phase_process(phase: str, run: str, stage: int, log: str, environment: dict[str, str]) -> int:
    """Run one process of a phase in a fork; returns the exit code."""
    become(log, environment)
    name_process(f"{phase}:{os.environ['RANK']}")
    return run_process(phase, Path(run), stage)


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


def first_imports() -> Iterator[None]:
    """Import, step by step, what engines and verifiers need with any recipe."""
    yield from import_modules("torch", "torch.distributed", "transformers")
    import transformers

    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):  # transformers imports them on first access
        getattr(transformers, name)
        yield
    yield from import_phases(actor=False)


def imports_of(recipe: Recipe) -> list[Iterator[None]]:
    """The further imports that the recipe needs, step by step, for each level."""
    hide_gpus_from_cpu_runs(recipe.actor.backend)
    training = ["megarl.actor"]
    if recipe.actor.backend == "cpu":
        training += ["megarl.actor.cpu_backend"]
    if recipe.run.tensorboard:
        training += ["tensorboard.summary.writer.event_file_writer"]
    engine = import_builtin_engine(recipe.model.path) if recipe.rollout.engine == "builtin" else iter(())
    return [
        import_prompts(recipe),
        itertools.chain(open_prompts(recipe), engine),
        itertools.chain(import_megatron(), import_modules(*training), import_phases(actor=True)),
    ]


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


def be_warm_process(agent: Connection, imports: Imports) -> None:
    """Set up this process as a warm process, and `serve` the node agent until that ends."""
    for number in STOP_SIGNALS:  # a scheduler signals every process of a job, but the agent decides what ends
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(os.environ["MEGARL_AGENT_PID"]))
    name_process("warm:")
    gc.disable()  # imports make no garbage worth collecting
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    serve(agent, imports)


if __name__ == "__main__":
    os.register_at_fork(after_in_child=die_with_parent)
    be_warm_process(Connection(int(sys.argv[1])), Imports(first_imports()))
