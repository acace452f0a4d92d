"""Submit a run to Slurm with nemo-run: one task per node, which runs `megarl train`.

python launch/slurm.py RECIPE.toml --run-dir DIR --nodes N --account A --partition P --time 04:00:00
python launch/slurm.py SWEEP.toml --run-dir DIR --array N --account A --partition P --detach

This script needs an environment of its own, which `make launch` makes (the extra ``launch`` in pyproject.toml); the job
uses the interpreter ``--python`` or a container. launch/README.md is the operator's guide.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

try:
    import nemo_run as run
except ImportError:
    sys.exit(
        "launch/slurm.py needs an environment of its own: run `make launch`, then "
        ".venv-launch/bin/python launch/slurm.py ..."
    )

# nemo-run's script requeues a job after every failure; after exit code 2, a mistake in recipe or data, it would only
# fail again
NOT_AGAIN = """\
scontrol() {
    [ "$1" = requeue ] && [ "${exitcode:-0}" -eq 2 ] && return
    command scontrol "$@"
}"""
SECRETS = {"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"}  # words in names of secret variables
ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # megarl is not installed in this environment; only its modules that read recipes are used

from launch.layout import (  # noqa: E402
    ChainJob,
    check_layout,
    missing_here,
    plan_chain,
    recipes_of_sweep,
    toml_value,
)
from megarl.errors import UserError  # noqa: E402
from megarl.own_file import is_own  # noqa: E402
from megarl.recipe.load import load_without_objective, read_tables  # noqa: E402
from megarl.recipe.names import ENGINES  # noqa: E402
from megarl.recipe.tables import ObjectiveTable, Recipe  # noqa: E402


def main() -> None:
    options = parse_options()
    try:
        if options.array:
            recipes = recipes_of_sweep(options.recipe)
        else:
            recipes = [load_without_objective(options.recipe, options.set)]
        recipe = max(recipes, key=lambda recipe: recipe.devices_per_node)
        links = plan_chain(recipe, options)
        for link, each in itertools.product(links, recipes):
            check_layout(each, link, options.gpus_per_node)
        if options.dry_run:
            for missing in dict.fromkeys(missing for each in recipes for missing in missing_here(each)):
                print(f"not on this machine: {missing}", file=sys.stderr)
        submit(recipe, links, options)
    except UserError as error:
        sys.exit(f"launch/slurm.py: {error}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("recipe", type=Path, help="a recipe; with --array a sweep file (docs/comparing.md)")
    add("--run-dir", type=Path, required=True, help="directory of the run, on a file system that all nodes share")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a recipe setting")
    add("--local", action="store_true", help="run on this machine, without Slurm")
    add("--nodes", type=int, default=1, help="number of nodes; default: 1")
    add("--gpus-per-node", type=int, help="default: as many as the recipe uses")
    add("--account", help="Slurm account; required except with --local")
    add("--partition")
    add("--time", default="04:00:00", help="time limit of an allocation; a longer run continues in the next one")
    add("--retries", type=int, default=10, help="how often to requeue a job that was preempted, or ended too early")
    add("--margin", type=int, default=300, help="seconds before the time limit at which the run saves and stops")
    add("--after", metavar="JOB", help="start after this Slurm job has ended successfully")
    add(
        "--array",
        type=int,
        metavar="N",
        help="submit N jobs of one node each that make the runs of a sweep in --run-dir",
    )
    add("--chain", action="store_true", help="submit a job per phase; it is cancelled if the one before it fails")
    add("--optimize-nodes", type=int, help="with --chain: nodes of the optimize jobs, default --nodes")
    add("--optimize-partition", help="with --chain: partition of the optimize jobs, default --partition")
    add("--container-image", help="image with megarl's dependencies (needs pyxis); default: no container")
    add("--container-mounts", action="append", default=[], metavar="SRC:DST", help="may be repeated")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of the job; NAME alone: with the value it has here; may be repeated",
    )
    add("--python", default="python", help="path on the nodes of an interpreter with megarl and its dependencies")
    add("--packager", choices=["none", "git"], default="none", help="git: ship this repository's HEAD with the job")
    add("--sbatch", action="append", default=[], metavar="NAME=VALUE", help="option of sbatch, such as qos=high")
    add("--dry-run", action="store_true", help="print the sbatch scripts, but submit nothing")
    add("--detach", action="store_true", help="return when the job is submitted, without waiting for it")
    add("--tail-logs", action="store_true", help="show the job's output while waiting (needs sacct)")
    options = parser.parse_args()
    if not options.local and not options.account:
        parser.error("--account is required (or --local, to run on this machine)")
    if (options.optimize_nodes or options.optimize_partition) and not options.chain:
        parser.error("--optimize-nodes and --optimize-partition need --chain: otherwise one job runs all phases")
    if options.local and (options.chain or options.nodes > 1):
        parser.error("--local runs everything on this machine: it excludes --chain and --nodes")
    if problem := problem_with_array(options):
        parser.error(f"--array {options.array}: {problem}")
    for variable in options.env:
        if problem := problem_with_variable(variable):
            parser.error(f"--env {variable.partition('=')[0]}: {problem}")
    return options


def problem_with_array(options: argparse.Namespace) -> str | None:
    """What is wrong with ``--array`` or does not go together with it; None if nothing is."""
    if options.array is None:
        return None
    if options.array < 1:
        return "give at least 1"
    if options.local or options.chain or options.set or options.nodes > 1 or options.packager != "none":
        return "excludes --local, --chain, --set, --nodes and --packager: each job makes runs of a sweep on one node"
    if not (options.detach or options.dry_run):
        return "needs --detach, because nemo-run cannot wait for an array"
    return None


def problem_with_variable(variable: str) -> str | None:
    """What is wrong with ``--env``; None if nothing is.

    NAME=VALUE is written to the job's script, which others may read, and printed in its log. The value of a NAME alone
    is not.
    """
    name, equals, _ = variable.partition("=")
    if not name.isupper():
        return "the name must be in capitals, since nemo-run exports only such names"
    if not equals and name not in os.environ:
        return "without =VALUE the value here is passed on, but the variable is not set here"
    if equals and SECRETS & set(name.split("_")):
        return f"the secret would be in the job's script and log: export {name} here and use --env {name}"
    if re.search(r"://[^/\s]*@", variable):
        return f"the password would be in the job's script and log: export {name} here and use --env {name}"
    return None


def agent_arguments(recipe: Recipe, link: ChainJob, options: argparse.Namespace) -> list[str]:
    """The arguments of ``megarl train``, or for an array of ``megarl sweep``, with absolute paths from the recipe."""
    if options.array:
        return ["sweep", str(options.recipe.resolve()), "--output", str(options.run_dir.resolve())]
    arguments = ["train", str(options.recipe.resolve()), "--run-dir", str(options.run_dir.resolve())]
    settings = [f'model.path="{recipe.model.path}"']
    if recipe.model.tokenizer:
        settings.append(f'model.tokenizer="{recipe.model.tokenizer}"')
    if recipe.data.sources:
        settings.append(f"data.sources={toml_value([table.model_dump() for table in recipe.data.sources])}")
    else:
        settings.append(f'data.train="{recipe.data.train}"')
    if recipe.data.template_file:
        settings.append(f'data.template="{recipe.data.template_file}"')
    interpreters = {engine: recipe.rollout.interpreter(engine) for engine in ENGINES}
    settings += [f'rollout.{engine}_python="{python}"' for engine, python in interpreters.items() if python]
    objective, reward, evaluation = recipe.objective, recipe.reward, recipe.eval
    paths = {
        "objective.advantage": objective.advantage if is_own(objective.advantage) else None,
        "reward.path": reward.path,
        "reward.service.prompt": reward.service and reward.service.prompt,
        "eval.suite": evaluation.suite,
        "eval.data.template": evaluation.data.get("template"),
    }
    settings += [f"{name}={toml_value(str(path))}" for name, path in paths.items() if path]
    settings += own_objective(recipe, options)
    for name, tables in {"reward.parts": reward.parts, "eval.suites": evaluation.suites}.items():
        if tables:
            settings.append(f"{name}={toml_value([table.model_dump(mode='json') for table in tables])}")
    for setting in [*options.set, *settings]:
        arguments += ["--set", setting]
    return arguments + (["--until", link.until] if link.until else [])


def own_objective(recipe: Recipe, options: argparse.Namespace) -> list[str]:
    """Settings with the absolute path of an objective of the user's own, and with its fields: another path drops those
    of the recipe."""
    changes = [setting for setting in options.set if setting.startswith(("objective.name=", "objective.path="))]
    if recipe.objective.path is None or (changes and changes[-1].startswith("objective.name=")):
        return []
    fields = {} if changes else read_tables(options.recipe)["objective"]
    own = {name: value for name, value in fields.items() if name not in ObjectiveTable.model_fields}
    return [f"objective.{name}={toml_value(value)}" for name, value in ({"path": recipe.objective.path} | own).items()]


def slurm_executor(recipe: Recipe, link: ChainJob, first: bool, options: argparse.Namespace) -> run.SlurmExecutor:
    """The settings of a Slurm job. first: whether it is the first of the chain, which waits for ``--after``."""
    # Slurm ends the job `margin` seconds after the signal: nine tenths of that time are for the processes to finish an
    # update and save, the rest is for the job to requeue itself
    seconds = options.margin - options.margin // 10
    variables = {"MEGARL_SHUTDOWN_SECONDS": str(seconds), **environment(options)}
    extra: dict[str, object] = {"kill_on_invalid_dep": "yes"}
    extra |= {name.replace("-", "_"): value for name, _, value in (each.partition("=") for each in options.sbatch)}
    if options.after and first:
        extra["dependency"] = f"afterok:{options.after}"
    executor = run.SlurmExecutor(
        account=options.account,
        partition=link.partition,
        time=options.time,
        nodes=link.nodes,
        ntasks_per_node=1,
        signal=f"TERM@{options.margin}",
        container_image=options.container_image,
        container_mounts=options.container_mounts,
        # sbatch passes on the whole environment, but a container image may set the same names to other values
        container_env=[name for name in options.env if "=" not in name] or None,
        env_vars={name: shlex.quote(value) for name, value in variables.items()},
        setup_lines=NOT_AGAIN,
        packager=packager(options),
        tunnel=run.LocalTunnel(job_dir=""),  # a local tunnel fails with any other directory
        additional_parameters=extra,
        poll_estimated_start_time=False,
    )
    executor.retries = options.retries
    if recipe.actor.backend == "cuda":
        executor.gpus_per_node = recipe.devices_per_node
        executor.exclusive, executor.mem = True, "0"  # a whole node; without --mem its memory may be a part of it
        executor.srun_args = ["--cpu-bind=none"]  # the one task of a node starts all its processes
    else:
        executor.cpus_per_task = recipe.devices_per_node
        executor.srun_args = [f"--cpus-per-task={executor.cpus_per_task}"]  # srun does not inherit it from sbatch
    if options.array:
        executor.array = f"0-{options.array - 1}"
    return executor


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables that are written to the job's script."""
    return dict(variable.split("=", 1) for variable in options.env if "=" in variable)


def packager(options: argparse.Namespace) -> run.Packager:
    return run.GitArchivePackager() if options.packager == "git" else run.Packager()


def submit(recipe: Recipe, links: list[ChainJob], options: argparse.Namespace) -> None:
    """Submit the jobs as one nemo-run experiment and wait until they are done, with ``--detach`` only submit them.

    Exits with a message if a job that was waited for did not succeed.
    """
    with run.Experiment(links[0].name if len(links) == 1 else f"{options.recipe.stem}-chain") as experiment:
        previous: list[str] = []
        for link in links:
            arguments = agent_arguments(recipe, link, options)
            if options.local:
                executor = run.LocalExecutor(packager=packager(options), env_vars=environment(options))
            else:
                executor = slurm_executor(recipe, link, link is links[0], options)
                arguments = [shlex.quote(argument) for argument in arguments]
            python = options.python
            if options.array:
                # paths in a sweep file and its recipes are relative to the directory of submission, but megarl is the
                # installed one, even if that is a clone
                python = f"env --chdir={shlex.quote(os.getcwd())} {python} -P"
            script = run.Script("megarl.cli", m=True, entrypoint=python, args=arguments)
            previous = [experiment.add(script, executor=executor, name=link.name, dependencies=previous or None)]
        if options.dry_run:
            print_scripts(experiment)
        else:
            experiment.run(detach=options.detach, tail_logs=options.tail_logs)
            print_jobs(experiment, options)
    # nemo-run has waited for the jobs at the end of the block
    states = {job.id: job.state.name for job in experiment.jobs}
    if not options.detach and not options.dry_run and set(states.values()) != {"SUCCEEDED"}:
        sys.exit(f"launch/slurm.py: {', '.join(f'{job} {state}' for job, state in states.items())}")


def print_scripts(experiment: run.Experiment) -> None:
    experiment.dryrun(log=False, delete_exp_dir=False)
    directories = {Path(job.executor.experiment_dir) for job in experiment.jobs}
    for directory in directories:
        for job in experiment.jobs:
            print((directory / f"{job.executor.job_name}_sbatch.sh").read_text())
        shutil.rmtree(directory)


def print_jobs(experiment: run.Experiment, options: argparse.Namespace) -> None:
    for job in experiment.jobs:
        identity = job.handle.partition("://")[2].split("/")[1]
        print(f"{job.id}: {'process' if options.local else 'Slurm job'} {identity}, output in {job.executor.job_dir}")
    print(f"run directory: {options.run_dir.resolve()}", flush=True)


if __name__ == "__main__":
    main()
