"""The command line: ``megarl train``, ``optimize``, ``eval``, ``report`` and the others.

Each command imports what it needs; the module itself imports nothing heavy, so that help and the first line of a run
appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megarl import __version__
from megarl.cli.arguments import Commands, Parser
from megarl.cli.arguments import command as _command
from megarl.cli.arguments import settings as _settings
from megarl.cli.before import add_before
from megarl.cli.comparing import add_beside
from megarl.cli.completion import SHELLS, script
from megarl.cli.inside import add_inside
from megarl.cli.stage import add_stage
from megarl.errors import PhaseFailed, UserError

# of files and directories, which another try would meet again
_MISTAKES = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)

if TYPE_CHECKING:
    from megarl.storage.run_dir import RunDir, Stage
    from megarl.workers.nodes import Nodes


def run() -> NoReturn:
    """`main`, then the end of the process without Python's own, which takes half a second where torch is imported."""
    code: str | int | None = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed and worth trying again, 2 a mistake to correct first, 130 stopped by a signal."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown)  # with the usage of the command itself
    interrupted = []

    def interrupt(*_: object) -> None:
        interrupted.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)  # a scheduler's stop is an interruption like any other
    try:
        options.command(options)
    except BaseException as error:
        # extension modules turn a KeyboardInterrupt in their import into other exceptions
        if interrupted or isinstance(error, KeyboardInterrupt):
            sys.exit(_complain("interrupted; start the same command again to continue", 130))
        if isinstance(error, UserError):
            sys.exit(_complain(error, 2))
        if isinstance(error, PhaseFailed):
            sys.exit(_complain(error, 1))
        if isinstance(error, BrokenPipeError) and not _is_read():
            sys.exit(128 + signal.SIGPIPE)  # as a program of the shell's ends in `megarl sql ... | head`
        if isinstance(error, OSError) and error.filename is not None:
            sys.exit(_complain(f"{error.filename}: {error.strerror}", 2 if error.errno in _MISTAKES else 1))
        raise


def _is_read() -> bool:
    """Whether somebody still reads what is printed."""
    pipe = select.poll()
    pipe.register(1, 0)
    return not any(event & select.POLLERR for _, event in pipe.poll(0))


def _complain(message: object, code: int) -> int:
    print(f"megarl: {message}", file=sys.stderr)
    return code


def _on_all_nodes(lead: Callable[[argparse.Namespace, Nodes], None]) -> Callable[[argparse.Namespace], None]:
    """A command on run directory ``run_dir``: the first node runs ``lead``, the others what it orders."""

    def command(options: argparse.Namespace) -> None:
        from megarl.workers.node_rank import find_node_rank
        from megarl.workers.processes import Starter

        node = find_node_rank(os.environ)
        if node.rank == 0:  # before the imports of torch and Megatron, which take seconds
            run_dir = vars(options).get("output") or options.run_dir  # a branch is written there alone
            new = not (run_dir / "recipe.toml").exists()
            print(f"megarl {__version__}: {'starting' if new else 'continuing'} {run_dir}", flush=True)
        with contextlib.closing(Starter()) as starter:
            starter.warm_up()  # it imports while this process reads the recipe; it dies with it
            if "continue_from" in options:
                from megarl.storage.origin import recorded

                options.set = [*recorded(options.run_dir), *options.set]  # the same command continues without them
            if node.count == 1 and getattr(options, "recipe", None):
                from megarl.recipe.load import load_without_objective

                load_without_objective(options.recipe, options.set)  # most mistakes show at once
            from megarl.workers.launcher import follow
            from megarl.workers.nodes import Nodes

            # `optimize --output` makes a run of its own; where it is, each node knows from its own command line
            run_dir = (getattr(options, "output", None) or options.run_dir).resolve()
            with Nodes(node, starter, run_dir) as nodes:
                if nodes.rank:
                    follow(nodes, run_dir)
                else:
                    lead(options, nodes)

    return command


def _train(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands import summarise_run
    from megarl.recipe.load import load_recipe
    from megarl.storage.origin import check_weights, link_start, record, result_of
    from megarl.storage.run_dir import RunDir
    from megarl.train import optimizes, train
    from megarl.workers.preflight import check

    checkpoint = None
    if options.continue_from:
        policy, checkpoint = result_of(options.continue_from)
        options.set.append(f"model.path={json.dumps(str(policy))}")
    recipe = load_recipe(options.recipe, options.set)
    if checkpoint is not None:
        check_weights(RunDir.open(options.continue_from).recipe, recipe)
    run = RunDir(options.run_dir.resolve(), recipe)
    if options.until:
        _stage(run, options.until[1])
    check(nodes.starter, recipe, nodes.count, optimizes(run, options.until))
    with run.lock():
        run = RunDir.create(run.root, recipe)  # which may write the recipe: only now is nobody else at work
        record(run.root, options.set)
        if checkpoint is not None:
            link_start(run, checkpoint)
        train(nodes, run, options.until)
    if not options.until:
        print(summarise_run(run))


def _rollout(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands import rollout_stage

    stage = _open_stage(options)
    with stage.run.lock():
        rollout_stage(nodes, stage)


def _serve(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.recipe.load import load_recipe
    from megarl.stages.serve import check_serving, serve_stage
    from megarl.storage.run_dir import RunDir

    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.set)
        check_serving(nodes, recipe)  # a mistake leaves no run directory
        with RunDir(options.run_dir.resolve(), recipe).lock():
            RunDir.create(options.run_dir, recipe)
    elif options.set:
        raise UserError("--set changes a recipe, so it needs --recipe RECIPE, with which a run begins")
    stage = _open_stage(options)
    with stage.run.lock():
        serve_stage(nodes, stage, options.port)


def _optimize(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands import optimize_branch, optimize_stage

    stage = _open_stage(options)
    if options.output:
        optimize_branch(nodes, stage, options.output, options.set)
        return
    if options.set:
        raise UserError("--set changes the recipe, so it needs --output DIR for the new run directory")
    with stage.run.lock():
        optimize_stage(nodes, stage)


def _evaluate(options: argparse.Namespace) -> None:
    from megarl.commands import describe_evaluations, evaluate_checkpoint, evaluate_model

    if (options.stage is None) != (options.update is None):
        raise UserError("--stage and --update belong together: updates of that stage, as of `megarl export`")
    if options.stage is not None:
        place = options.stage, options.update
        results = evaluate_checkpoint(options.model_or_run, place, options.suite, options.set, options.output)
    else:
        results = evaluate_model(options.model_or_run, options.recipe, options.suite, options.set, options.output)
    print(json.dumps(results) if options.json else describe_evaluations(results))


def _export(options: argparse.Namespace) -> None:
    from megarl.commands import export_policy

    print(export_policy(options.run_dir, options.stage, options.update, options.output, options.adapters))


def _report(options: argparse.Namespace) -> None:
    from megarl.views.report import write_report

    if len(options.run_dirs) > 1 and not options.output:
        raise UserError("--output FILE says where the page about several runs goes")
    output = options.output or options.run_dirs[0] / "report.html"
    print(write_report(options.run_dirs, output))


def _audit(options: argparse.Namespace) -> None:
    from megarl.views.audit import audit

    found = audit(options.run_dir, options.samples)
    print(found.as_json() if options.json else found.table())
    if found.problems:
        sys.exit(1)


def _completion(options: argparse.Namespace) -> None:
    print(script(options.shell, _parser()))


def _doctor(options: argparse.Namespace) -> None:
    from megarl.views.doctor import diagnose

    if options.recipe is None:
        return print(diagnose(options.json))
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        options.run_dir = (options.scratch or Path(folder)) / "megarl-rehearsal"
        _on_all_nodes(_rehearse)(options)
    return None


def _rehearse(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands import rehearse_recipe

    print(rehearse_recipe(nodes, options.recipe, options.set, options.run_dir))


def _open_stage(options: argparse.Namespace) -> Stage:
    from megarl.storage.run_dir import RunDir

    run = RunDir.open(options.run_dir)
    run.check_links()
    return _stage(run, options.stage)


def _stage(run: RunDir, number: int) -> Stage:
    if not 0 <= number < run.recipe.schedule.stages:
        raise UserError(f"--stage {number}: this run has stages 0 to {run.recipe.schedule.stages - 1}")
    return run.stage(number)


def _phase_and_stage(text: str) -> tuple[str, int]:
    phase, _, stage = text.partition(":")
    if phase not in ("rollout", "optimize") or not stage.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither rollout:STAGE nor optimize:STAGE")
    return phase, int(stage)


def _parser() -> Parser:
    parser = Parser(prog="megarl", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_phases(commands)
    _add_evaluation(commands)
    _add_views(commands)
    add_before(commands)
    add_inside(commands)
    add_stage(commands)
    return parser


def _add_phases(commands: Commands) -> None:
    sub = _command(commands, "train", _on_all_nodes(_train), "the whole run; start it again to continue it")
    sub.add_argument("recipe", type=Path)
    sub.add_argument("--run-dir", type=Path, required=True)
    sub.add_argument(
        "--continue-from", type=Path, metavar="RUN", help="begin with the result of a finished run, and its optimizer"
    )
    sub.add_argument(
        "--until", type=_phase_and_stage, metavar="PHASE:STAGE", help="stop after it, for example rollout:0"
    )
    _settings(sub)

    sub = _command(commands, "rollout", _on_all_nodes(_rollout), "generate and seal the rollouts of one stage")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--stage", type=int, required=True)

    sub = _command(commands, "serve", _on_all_nodes(_serve), "an OpenAI-compatible server whose agents fill a stage")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--stage", type=int, required=True)
    sub.add_argument("--port", type=int, default=8400, help="on loopback; 0: any free one; default: 8400")
    sub.add_argument("--recipe", type=Path, help="begin the run, where there is none")
    _settings(sub)

    sub = _command(commands, "optimize", _on_all_nodes(_optimize), "all updates of one stage on its sealed rollouts")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--stage", type=int, required=True)
    sub.add_argument("--output", type=Path, help="write to a new run directory, with other settings")
    _settings(sub)

    sub = _command(commands, "export", _export, "the policy of any checkpoint as a Hugging Face directory")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--stage", type=int, required=True)
    sub.add_argument("--update", type=int, required=True, help="updates of the stage before it")
    sub.add_argument("--output", type=Path, required=True, help="the directory to make")
    sub.add_argument("--adapters", action="store_true", help="of [actor.lora] the adapters alone, as PEFT stores them")


def _add_evaluation(commands: Commands) -> None:
    sub = _command(commands, "eval", _evaluate, "avg@k, pass@k and maj@k with their intervals")
    sub.add_argument("model_or_run", type=Path)
    sub.add_argument("--recipe", type=Path, help="data and reward settings, when the model is not part of a run")
    sub.add_argument(
        "--suite",
        action="append",
        default=[],
        help="name of a suite of the recipe, prompt file or reasoning-gym generator; may be repeated; default: all of "
        "the recipe's",
    )
    sub.add_argument("--stage", type=int, help="with --update: of the run, the policy of a checkpoint")
    sub.add_argument("--update", type=int, help="updates of that stage before it")
    sub.add_argument("--output", type=Path, help="a directory that keeps the responses, and continues if interrupted")
    sub.add_argument("--json", action="store_true", help="one JSON list, an object a suite")
    _settings(sub)
    add_beside(commands)


def _add_views(commands: Commands) -> None:
    sub = _command(commands, "report", _report, "one self-contained HTML page; several runs side by side")
    sub.add_argument("run_dirs", type=Path, nargs="+")
    sub.add_argument("--output", type=Path)

    sub = _command(
        commands, "audit", _audit, "whether all that a run directory holds agrees; exit code 1 if it does not"
    )
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--samples", type=int, default=16, help="groups a stage that are scored again; default: 16")
    sub.add_argument("--json", action="store_true", help="one JSON object")

    sub = _command(commands, "completion", _completion, "what a shell needs to complete commands and options")
    sub.add_argument("shell", choices=SHELLS, help='as in: eval "$(megarl completion bash)"')

    sub = _command(commands, "doctor", _doctor, "what this machine has, what is missing, which extra installs it")
    sub.add_argument("--recipe", type=Path, help="instead: rehearse an update, export and checkpoint of this recipe")
    sub.add_argument("--scratch", type=Path, help="where the rehearsal writes; shared by several nodes")
    sub.add_argument("--json", action="store_true", help="one JSON object; without --recipe")
    _settings(sub)
