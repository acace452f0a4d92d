"""The command line: ``megarl train``, ``optimize``, ``eval``, ``report`` and the others.

Each command imports what it needs when it is called. The module itself imports nothing heavy, so that ``--help`` and
the first line of a run appear at once.
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

# errors of files and directories that a retry would meet again
_MISTAKES = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)

if TYPE_CHECKING:
    from megarl.storage.run_dir import RunDir, Stage
    from megarl.workers.nodes import Nodes


def run() -> NoReturn:
    """`main`, then exit without Python's finalisation, which takes half a second once torch is imported."""
    code: str | int | None = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of a pipe may have ended
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed but worth a retry, 2 a mistake to correct first, 130 stopped by a signal."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown)  # shows the usage of the command instead of that of megarl
    interrupted = []

    def interrupt(*_: object) -> None:
        interrupted.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)  # sent by schedulers
    try:
        options.command(options)
    except BaseException as error:
        # an interrupted import of an extension module may raise another exception than KeyboardInterrupt
        if interrupted or isinstance(error, KeyboardInterrupt):
            sys.exit(_print_error("interrupted; start the same command again to continue", 130))
        if isinstance(error, UserError):
            sys.exit(_print_error(error, 2))
        if isinstance(error, PhaseFailed):
            sys.exit(_print_error(error, 1))
        if isinstance(error, BrokenPipeError) and not _stdout_has_reader():
            sys.exit(128 + signal.SIGPIPE)  # the exit code of other programs in `megarl sql ... | head`
        if isinstance(error, OSError) and error.filename is not None:
            sys.exit(_print_error(f"{error.filename}: {error.strerror}", 2 if error.errno in _MISTAKES else 1))
        raise


def _stdout_has_reader() -> bool:
    """Whether the pipe on stdout, if it is one, is still open at its other end."""
    pipe = select.poll()
    pipe.register(1, 0)
    return not any(event & select.POLLERR for _, event in pipe.poll(0))


def _print_error(message: object, code: int) -> int:
    print(f"megarl: {message}", file=sys.stderr)
    return code


def _on_all_nodes(lead: Callable[[argparse.Namespace, Nodes], None]) -> Callable[[argparse.Namespace], None]:
    """A command on a run directory: the first node (the leader) runs ``lead``, the others start what it orders."""

    def command(options: argparse.Namespace) -> None:
        from megarl.workers.node_rank import find_node_rank
        from megarl.workers.processes import Starter

        node = find_node_rank(os.environ)
        if node.rank == 0:  # printed before the imports of torch and Megatron, which take seconds
            run_dir = vars(options).get("output") or options.run_dir  # a branch writes only to --output
            new = not (run_dir / "recipe.toml").exists()
            print(f"megarl {__version__}: {'starting' if new else 'continuing'} {run_dir}", flush=True)
        with contextlib.closing(Starter()) as starter:
            starter.warm_up()  # the warm process imports packages while this process reads the recipe
            if "continue_from" in options:
                from megarl.storage.run_dir.recipes import recorded_overrides

                # --set need not be repeated to continue
                options.set = [*recorded_overrides(options.run_dir), *options.set]
            if node.count == 1 and getattr(options, "recipe", None):
                from megarl.recipe.load import load_without_objective

                load_without_objective(options.recipe, options.set)  # reports most mistakes at once
            from megarl.workers.launcher import follow
            from megarl.workers.nodes import Nodes

            # `optimize --output` makes a new run; each node takes its path from its own command line
            run_dir = (getattr(options, "output", None) or options.run_dir).resolve()
            with Nodes(node, starter, run_dir) as nodes:
                if nodes.rank:
                    follow(nodes, run_dir)
                else:
                    lead(options, nodes)

    return command


def _train(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.train import optimizes, summarise_run, train
    from megarl.recipe.load import load_recipe
    from megarl.storage.run_dir import RunDir
    from megarl.storage.run_dir.recipes import check_continues, record_overrides
    from megarl.workers.preflight import check

    checkpoint = None
    if options.continue_from:
        policy, checkpoint = RunDir.open(options.continue_from).result()
        options.set.append(f"model.path={json.dumps(str(policy))}")
    recipe = load_recipe(options.recipe, options.set)
    if checkpoint is not None:
        check_continues(RunDir.open(options.continue_from).recipe, recipe)
    run = RunDir(options.run_dir.resolve(), recipe)
    if options.until:
        _stage(run, options.until[1])
    check(nodes.starter, recipe, nodes.count, optimizes(run, options.until))
    with run.lock():
        run = RunDir.create(run.root, recipe)  # may write the recipe, so it needs the lock
        record_overrides(run.root, options.set)
        if checkpoint is not None:
            run.start_from(checkpoint)
        train(nodes, run, options.until)
    if not options.until:
        print(summarise_run(run))


def _rollout(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.one_phase import rollout_stage

    stage = _open_stage(options)
    with stage.run.lock():
        rollout_stage(nodes, stage)


def _serve(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.stages.serve import check_serving, serve_stage
    from megarl.recipe.load import load_recipe
    from megarl.storage.run_dir import RunDir

    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.set)
        check_serving(nodes, recipe)  # first, so that a mistake leaves no run directory
        with RunDir(options.run_dir.resolve(), recipe).lock():
            RunDir.create(options.run_dir, recipe)
    elif options.set:
        raise UserError("--set needs --recipe RECIPE: settings can only be changed when a run begins")
    stage = _open_stage(options)
    with stage.run.lock():
        serve_stage(nodes, stage, options.port)


def _optimize(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.one_phase import optimize_branch, optimize_stage

    stage = _open_stage(options)
    if options.output:
        optimize_branch(nodes, stage, options.output, options.set)
        return
    if options.set:
        raise UserError("--set needs --output DIR: other settings need a new run directory")
    with stage.run.lock():
        optimize_stage(nodes, stage)


def _evaluate(options: argparse.Namespace) -> None:
    from megarl.commands.evaluate import describe_evaluations, evaluate_checkpoint, evaluate_model

    if (options.stage is None) != (options.update is None):
        raise UserError("--stage and --update must be given together: they name a policy, as in `megarl export`")
    if options.stage is not None:
        place = options.stage, options.update
        results = evaluate_checkpoint(options.model_or_run, place, options.suite, options.set, options.output)
    else:
        results = evaluate_model(options.model_or_run, options.recipe, options.suite, options.set, options.output)
    print(json.dumps(results) if options.json else describe_evaluations(results))


def _export(options: argparse.Namespace) -> None:
    from megarl.commands.evaluate import export_policy

    print(export_policy(options.run_dir, options.stage, options.update, options.output, options.adapters))


def _report(options: argparse.Namespace) -> None:
    from megarl.views.report import write_report

    if len(options.run_dirs) > 1 and not options.output:
        raise UserError("a report on several runs needs --output FILE")
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
    from megarl.commands.one_phase import rehearse_recipe

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
    sub = _command(commands, "train", _on_all_nodes(_train), "make a whole run; start it again to continue it")
    sub.add_argument("recipe", type=Path, help="the recipe, a TOML file")
    sub.add_argument("--run-dir", type=Path, required=True, help="directory of the run; made if it does not exist")
    sub.add_argument(
        "--continue-from",
        type=Path,
        metavar="RUN",
        help="start from the result and the optimizer state of this finished run",
    )
    sub.add_argument(
        "--until", type=_phase_and_stage, metavar="PHASE:STAGE", help="stop after this phase, for example rollout:0"
    )
    _settings(sub)

    sub = _command(commands, "rollout", _on_all_nodes(_rollout), "generate and seal the rollouts of one stage")
    sub.add_argument("run_dir", type=Path, help="a run directory")
    sub.add_argument("--stage", type=int, required=True, help="number of the stage, from 0")

    sub = _command(
        commands, "serve", _on_all_nodes(_serve), "serve an OpenAI-compatible API to agents that fill a stage"
    )
    sub.add_argument("run_dir", type=Path, help="a run directory")
    sub.add_argument("--stage", type=int, required=True, help="number of the stage, from 0")
    sub.add_argument("--port", type=int, default=8400, help="port on 127.0.0.1; 0: any free port; default: 8400")
    sub.add_argument("--recipe", type=Path, help="begin the run with this recipe, if it does not exist yet")
    _settings(sub)

    sub = _command(
        commands, "optimize", _on_all_nodes(_optimize), "make all updates of one stage on its sealed rollouts"
    )
    sub.add_argument("run_dir", type=Path, help="a run directory")
    sub.add_argument("--stage", type=int, required=True, help="number of the stage, from 0")
    sub.add_argument("--output", type=Path, help="a new run directory, which may have other settings (--set)")
    _settings(sub)

    sub = _command(commands, "export", _export, "write the policy of any checkpoint as a Hugging Face directory")
    sub.add_argument("run_dir", type=Path, help="a run directory")
    sub.add_argument("--stage", type=int, required=True, help="number of the stage, from 0")
    sub.add_argument("--update", type=int, required=True, help="the policy after this many updates of the stage")
    sub.add_argument("--output", type=Path, required=True, help="the directory to make")
    sub.add_argument("--adapters", action="store_true", help="only the adapters of [actor.lora], in PEFT's format")


def _add_evaluation(commands: Commands) -> None:
    sub = _command(commands, "eval", _evaluate, "evaluate a policy: avg@k, pass@k and maj@k with their intervals")
    sub.add_argument("model_or_run", type=Path, help="a run directory, for its newest policy, or a Hugging Face model")
    sub.add_argument("--recipe", type=Path, help="data and reward settings, when the model is not part of a run")
    sub.add_argument(
        "--suite",
        action="append",
        default=[],
        help="name of a suite of the recipe, prompt file or reasoning-gym generator; may be repeated; default: all "
        "suites of the recipe",
    )
    sub.add_argument("--stage", type=int, help="with --update: evaluate the policy of a checkpoint of this stage")
    sub.add_argument("--update", type=int, help="the policy after this many updates of --stage")
    sub.add_argument("--output", type=Path, help="directory to keep the responses; an interrupted evaluation continues")
    sub.add_argument("--json", action="store_true", help="print a JSON list with one object per suite")
    _settings(sub)
    add_beside(commands)


def _add_views(commands: Commands) -> None:
    sub = _command(commands, "report", _report, "write a self-contained HTML page about one or several runs")
    sub.add_argument("run_dirs", type=Path, nargs="+")
    sub.add_argument("--output", type=Path, help="the HTML file; default for one run: report.html in its directory")

    sub = _command(
        commands, "audit", _audit, "verify that everything in a run directory is consistent; exit code 1 if it is not"
    )
    sub.add_argument("run_dir", type=Path, help="a run directory")
    sub.add_argument("--samples", type=int, default=16, help="groups per stage to score again; default: 16")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = _command(commands, "completion", _completion, "print a shell script that completes commands and options")
    sub.add_argument("shell", choices=SHELLS, help='as in: eval "$(megarl completion bash)"')

    sub = _command(
        commands, "doctor", _doctor, "show what this machine has, what is missing and which extra installs it"
    )
    sub.add_argument(
        "--recipe", type=Path, help="instead rehearse one update, its export and a checkpoint with this recipe"
    )
    sub.add_argument(
        "--scratch", type=Path, help="where the rehearsal writes; must be shared if there are several nodes"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object; not with --recipe")
    _settings(sub)
