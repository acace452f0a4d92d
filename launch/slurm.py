"""Submit a run to Slurm with nemo-run: one task a node, each the node agent of `megarl train`.

python launch/slurm.py RECIPE.toml --run-dir DIR --nodes N --account A --partition P --time 04:00:00
python launch/slurm.py SWEEP.toml --run-dir DIR --array N --account A --partition P --detach

Runs in an environment of its own (`pip install` what the extra ``launch`` of pyproject.toml lists); the job uses
``--python`` or a container. launch/README.md is the operator's guide.
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
        "launch/slurm.py runs in an environment of its own, which `make launch` makes; then: "
        ".venv-launch/bin/python launch/slurm.py ..."
    )

# nemo-run's script queues a failed job again whatever the cause; after exit code 2, a mistake in recipe or data, that
# would only fail again
NOT_AGAIN = """\
scontrol() {
    [ "$1" = requeue ] && [ "${exitcode:-0}" -eq 2 ] && return
    command scontrol "$@"
}"""
SECRETS = {"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"}  # in names of variables
ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # megarl is not installed here, and only its recipes are read

from launch.layout import (  # noqa: E402
    Link,
    check_layout,
    missing_here,
    plan_links,
    recipes_of_sweep,
    toml_value,
)
from megarl.errors import UserError  # noqa: E402
from megarl.recipe.load import load_without_objective  # noqa: E402
from megarl.recipe.tables import Recipe  # noqa: E402


def main() -> None:
    options = parse_options()
    try:
        if options.array:
            recipes = recipes_of_sweep(options.recipe)
        else:
            recipes = [load_without_objective(options.recipe, options.set)]
        recipe = max(recipes, key=lambda recipe: recipe.devices_per_node)
        links = plan_links(recipe, options)
        for link, one in itertools.product(links, recipes):
            check_layout(one, link, options.gpus_per_node)
        if options.dry_run:
            for missing in dict.fromkeys(missing for one in recipes for missing in missing_here(one)):
                print(f"not on this machine: {missing}", file=sys.stderr)
        submit(recipe, links, options)
    except UserError as error:
        sys.exit(f"launch/slurm.py: {error}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("recipe", type=Path, help="with --array a sweep file: docs/comparing.md")
    add("--run-dir", type=Path, required=True, help="on a file system that all nodes share")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a recipe setting")
    add("--local", action="store_true", help="run on this machine, without Slurm")
    add("--nodes", type=int, default=1)
    add("--gpus-per-node", type=int, help="default: what the recipe uses")
    add("--account", help="Slurm account; required except with --local")
    add("--partition")
    add("--time", default="04:00:00", help="limit of one allocation; a longer run continues in the next")
    add("--retries", type=int, default=10, help="how often a job is queued again: preempted, out of time, or failed")
    add("--margin", type=int, default=300, help="seconds before the limit at which the run is told to save and stop")
    add("--after", metavar="JOB", help="start when this Slurm job has ended well")
    add("--array", type=int, metavar="N", help="N jobs of one node each make the runs of a sweep in --run-dir")
    add("--chain", action="store_true", help="every phase a job of its own, cancelled when the one before it fails")
    add("--optimize-nodes", type=int, help="with --chain: nodes of the optimize jobs, default --nodes")
    add("--optimize-partition", help="with --chain: partition of the optimize jobs, default --partition")
    add("--container-image", help="image with megarl's dependencies (needs pyxis); default: no container")
    add("--container-mounts", action="append", default=[], metavar="SRC:DST")
    add(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="environment of the job; NAME: as it is here"
    )
    add("--python", default="python", help="interpreter that has megarl and its dependencies, as the nodes see it")
    add("--packager", choices=["none", "git"], default="none", help="git: ship this repository's HEAD with the job")
    add("--dry-run", action="store_true", help="print the sbatch scripts, submit nothing")
    add("--detach", action="store_true", help="return once submitted")
    add("--tail-logs", action="store_true", help="show the job's output meanwhile (needs sacct)")
    options = parser.parse_args()
    if not options.local and not options.account:
        parser.error("--account is required (or --local, to run on this machine)")
    if (options.optimize_nodes or options.optimize_partition) and not options.chain:
        parser.error("--optimize-nodes and --optimize-partition need --chain: otherwise one job runs all phases")
    if options.local and (options.chain or options.nodes > 1):
        parser.error("--local is one machine and one process after another: no --chain, no --nodes")
    if problem := problem_with_array(options):
        parser.error(f"--array {options.array}: {problem}")
    for variable in options.env:
        if problem := problem_with_variable(variable):
            parser.error(f"--env {variable.partition('=')[0]}: {problem}")
    return options


def problem_with_array(options: argparse.Namespace) -> str | None:
    """What does not go together with the jobs of a sweep."""
    if options.array is None:
        return None
    if options.array < 1:
        return "at least one job"
    if options.local or options.chain or options.set or options.nodes > 1 or options.packager != "none":
        return "no --local, --chain, --set, --nodes and --packager: each job makes runs of a sweep, one after another"
    if not (options.detach or options.dry_run):
        return "with --detach: nemo-run cannot wait for an array"
    return None


def problem_with_variable(variable: str) -> str | None:
    """Values are written into the job's script, which others may read, and printed in its log; names alone are not."""
    name, equals, _ = variable.partition("=")
    if not name.isupper():
        return "a name in capitals, as nemo-run exports it"
    if not equals and name not in os.environ:
        return "without =VALUE it is passed as it is here, but it is not set here"
    if equals and SECRETS & set(name.split("_")):
        return f"a secret would stand in the job's script and log: export {name} here and pass --env {name}"
    if re.search(r"://[^/\s]*@", variable):
        return f"a password would stand in the job's script and log: export {name} here and pass --env {name}"
    return None


def agent_arguments(recipe: Recipe, link: Link, options: argparse.Namespace) -> list[str]:
    """``megarl train`` with paths that hold on every node, whatever its working directory; or ``megarl sweep``."""
    if options.array:
        return ["sweep", str(options.recipe.resolve()), "--output", str(options.run_dir.resolve()), "--jobs", "1"]
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
    if recipe.rollout.sglang_python:
        settings.append(f'rollout.sglang_python="{recipe.rollout.sglang_python}"')
    if recipe.eval.suite:
        settings.append(f'eval.suite="{recipe.eval.suite}"')
    settings += [f'eval.suites.{table.name}.suite="{table.suite}"' for table in recipe.eval.suites if table.suite]
    for setting in [*options.set, *settings]:
        arguments += ["--set", setting]
    return arguments + (["--until", link.until] if link.until else [])


def slurm_executor(recipe: Recipe, link: Link, first: bool, options: argparse.Namespace) -> run.SlurmExecutor:
    # Slurm ends the job `margin` seconds after the signal: nine tenths of them are for processes to finish their update
    # and save, the rest for the job to queue itself again
    seconds = options.margin - options.margin // 10
    variables = {"MEGARL_SHUTDOWN_SECONDS": str(seconds), **environment(options)}
    extra: dict[str, object] = {"kill_on_invalid_dep": "yes"}
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
        # sbatch hands on all of this environment; an image may set the same names otherwise
        container_env=[name for name in options.env if "=" not in name] or None,
        env_vars={name: shlex.quote(value) for name, value in variables.items()},
        setup_lines=NOT_AGAIN,
        packager=packager(options),
        tunnel=run.LocalTunnel(job_dir=""),  # any other directory fails with a local tunnel
        additional_parameters=extra,
        poll_estimated_start_time=False,
    )
    executor.retries = options.retries
    if recipe.actor.backend == "cuda":
        executor.gpus_per_node = recipe.devices_per_node
        executor.exclusive = True
        executor.srun_args = ["--cpu-bind=none"]  # one task starts all of a node's processes
    else:
        executor.cpus_per_task = recipe.devices_per_node
        executor.srun_args = [f"--cpus-per-task={executor.cpus_per_task}"]  # srun does not take it from sbatch
    if options.array:
        executor.array = f"0-{options.array - 1}"
        # the paths in a sweep file and its recipes are those of the directory where it is submitted
        executor.srun_args += ["--container-workdir" if options.container_image else "--chdir", os.getcwd()]
    return executor


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What is written into the job's script."""
    return dict(variable.split("=", 1) for variable in options.env if "=" in variable)


def packager(options: argparse.Namespace) -> run.Packager:
    return run.GitArchivePackager() if options.packager == "git" else run.Packager()


def submit(recipe: Recipe, links: list[Link], options: argparse.Namespace) -> None:
    """Through one nemo-run experiment; returns when the jobs are done, or submitted with ``--detach``."""
    with run.Experiment(links[0].name if len(links) == 1 else f"{options.recipe.stem}-chain") as experiment:
        previous: list[str] = []
        for link in links:
            arguments = agent_arguments(recipe, link, options)
            if options.local:
                executor = run.LocalExecutor(packager=packager(options), env_vars=environment(options))
            else:
                executor = slurm_executor(recipe, link, link is links[0], options)
                arguments = [shlex.quote(argument) for argument in arguments]
            script = run.Script("megarl.cli", m=True, entrypoint=options.python, args=arguments)
            previous = [experiment.add(script, executor=executor, name=link.name, dependencies=previous or None)]
        if options.dry_run:
            print_scripts(experiment)
        else:
            experiment.run(detach=options.detach, tail_logs=options.tail_logs)
            print_jobs(experiment, options)
    # nemo-run waits at the end of the block
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
