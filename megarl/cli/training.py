"""The commands that make runs, or one phase of them, on one or several nodes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import __version__
from megarl.cli.arguments import UPDATE, Commands, add_stage, command, settings
from megarl.errors import UserError

if TYPE_CHECKING:
    from megarl.workers.nodes import Nodes
    from megarl.workers.processes import Starter


def _on_all_nodes(
    lead: Callable[[argparse.Namespace, Nodes], None], options: argparse.Namespace, trains: bool = True
) -> None:
    """Execute a command on a run directory: the first node runs ``lead``, the others the phases that it begins.

    Mistakes in ``options.recipe``, if it has one, are reported as soon as possible. With ``--output`` it makes a new
    run there, and writes only to that.

    trains: it updates the model.
    """
    from megarl.workers.node_rank import find_node_rank

    node = find_node_rank(os.environ)
    run_dir: Path = getattr(options, "output", None) or options.run_dir
    if node.rank == 0:  # printed before the imports of torch and Megatron, which take seconds
        new = not (run_dir / "recipe.toml").exists()
        print(f"megarl {__version__}: {'starting' if new else 'continuing'} {run_dir}", flush=True)
    starter = _starter(options, trains, alone=node.count == 1)
    from megarl.workers.launcher import follow
    from megarl.workers.nodes import Nodes

    run_dir = run_dir.resolve()  # each node takes it from its own command line
    with Nodes(node, starter, run_dir) as nodes:
        if nodes.rank:
            follow(nodes, run_dir)
        else:
            lead(options, nodes)


def _starter(options: argparse.Namespace, trains: bool, alone: bool) -> Starter:
    """A starter of processes, whose fork server imports packages from now on. alone: on the only node."""
    from megarl.recipe.load import load_without_objective
    from megarl.workers.processes import Starter

    starter = Starter()
    given = getattr(options, "recipe", None)
    try:
        recipe = load_without_objective(given or options.run_dir / "recipe.toml", options.set if given else ())
    except UserError:  # of several nodes, the first reports it
        if given and alone:
            raise
    else:
        starter.prepare(recipe, trains)
    return starter


def _train(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.scratch import stage_of
    from megarl.commands.train import optimizes, summarise_run, train
    from megarl.planner.preflight import check
    from megarl.recipe.load import load_recipe
    from megarl.storage.run_dir import RunDir
    from megarl.storage.run_dir.recipes import check_continues

    checkpoint = None
    if options.continue_from:
        policy, checkpoint = RunDir.open(options.continue_from).result()
        options.set.append(f"model.path={json.dumps(str(policy))}")
    recipe = load_recipe(options.recipe, options.set)
    if checkpoint is not None:
        check_continues(RunDir.open(options.continue_from).recipe, recipe)
    run = RunDir(options.run_dir.resolve(), recipe)
    if options.until:
        stage_of(run, options.until[1])
    check(nodes.starter, recipe, nodes.count, optimizes(run, options.until))
    with run.lock():
        run = RunDir.create(run.root, recipe)  # may write the recipe, so it needs the lock
        if checkpoint is not None:
            run.start_from(checkpoint)
        train(nodes, run, options.until)
    if not options.until:
        print(summarise_run(run))


def _rollout(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.one_phase import rollout_stage
    from megarl.commands.scratch import open_stage

    stage = open_stage(options.run_dir, options.stage)
    with stage.run.lock():
        rollout_stage(nodes, stage)


def _serve(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.one_phase import check_serving, serve_stage
    from megarl.commands.scratch import open_stage
    from megarl.recipe.load import load_recipe
    from megarl.storage.run_dir import RunDir

    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.set)
        check_serving(nodes, recipe)  # first, so that a mistake leaves no run directory
        with RunDir(options.run_dir.resolve(), recipe).lock():
            RunDir.create(options.run_dir, recipe)
    elif options.set:
        raise UserError("--set needs --recipe RECIPE: settings can only be changed when a run begins")
    stage = open_stage(options.run_dir, options.stage)
    with stage.run.lock():
        serve_stage(nodes, stage, options.port)


def _optimize(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.one_phase import optimize_branch, optimize_stage
    from megarl.commands.scratch import open_stage

    stage = open_stage(options.run_dir, options.stage)
    if options.output:
        optimize_branch(nodes, stage, options.output, options.set)
        return
    if options.set:
        raise UserError("--set needs --output DIR: other settings need a new run directory")
    with stage.run.lock():
        optimize_stage(nodes, stage)


def _rehearse(options: argparse.Namespace, nodes: Nodes) -> None:
    from megarl.commands.one_phase import rehearse_recipe

    print(rehearse_recipe(nodes, options.recipe, options.set, options.run_dir))


def _doctor(options: argparse.Namespace) -> None:
    from megarl.views.doctor import diagnose

    if options.recipe is None:
        return print(diagnose(options.json))
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        options.run_dir = (options.scratch or Path(folder)) / "megarl-rehearsal"
        _on_all_nodes(_rehearse, options)
    return None


def _export(options: argparse.Namespace) -> None:
    from megarl.commands.evaluate import export_policy

    print(export_policy(options.run_dir, options.stage, options.update, options.output, options.adapters))


def _phase_and_stage(text: str) -> tuple[str, int]:
    phase, _, stage = text.partition(":")
    if phase not in ("rollout", "optimize") or not stage.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither rollout:STAGE nor optimize:STAGE")
    return phase, int(stage)


def add_training(commands: Commands) -> None:
    train = partial(_on_all_nodes, _train)
    sub = command(commands, "train", train, "make a whole run; start it again to continue it")
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
    settings(sub)

    rollout = partial(_on_all_nodes, _rollout, trains=False)
    sub = command(commands, "rollout", rollout, "generate and seal the rollouts of one stage")
    add_stage(sub)

    serve = partial(_on_all_nodes, _serve, trains=False)
    sub = command(commands, "serve", serve, "serve an OpenAI-compatible API to agents that fill a stage")
    add_stage(sub)
    sub.add_argument("--port", type=int, default=8400, help="port on 127.0.0.1; 0: any free port; default: 8400")
    sub.add_argument("--recipe", type=Path, help="begin the run with this recipe, if it does not exist yet")
    settings(sub)

    optimize = partial(_on_all_nodes, _optimize)
    sub = command(commands, "optimize", optimize, "make all updates of one stage on its sealed rollouts")
    add_stage(sub)
    sub.add_argument("--output", type=Path, help="a new run directory, which may have other settings (--set)")
    settings(sub)

    sub = command(commands, "export", _export, "write the policy of any checkpoint as a Hugging Face directory")
    add_stage(sub)
    sub.add_argument("--update", type=int, required=True, help=UPDATE)
    sub.add_argument("--output", type=Path, required=True, help="the directory to make")
    sub.add_argument("--adapters", action="store_true", help="only the adapters of [actor.lora], in PEFT's format")

    sub = command(
        commands, "doctor", _doctor, "show what this machine has, what is missing and which extra installs it"
    )
    sub.add_argument(
        "--recipe", type=Path, help="instead rehearse updates, their export and a checkpoint with this recipe"
    )
    sub.add_argument(
        "--scratch", type=Path, help="where the rehearsal writes; must be shared if there are several nodes"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object; not with --recipe")
    settings(sub)
