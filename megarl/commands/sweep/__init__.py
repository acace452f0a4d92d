"""``megarl sweep``: runs with different settings and seeds, in ordinary run directories, and a table of results."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

from megarl.commands.sweep.plan import Job, SweepPlan, plan_sweep
from megarl.commands.sweep.results import as_records, read_finished, rows, runs_csv, table_csv, table_text
from megarl.commands.sweep.workers import Workers, check_run, make_run
from megarl.errors import Busy, PhaseFailed, UserError
from megarl.foreign import escape, quoted
from megarl.recipe.sweep import load_sweep
from megarl.storage.files import write_atomic


def describe(path: Path, output: Path, as_json: bool = False) -> str:
    """What `sweep` would do: every run with its settings and state.

    as_json: only the runs, as a JSON list.
    """
    plan = plan_sweep(load_sweep(path), output)
    if as_json:
        return json.dumps([_record(job) for job in plan.all])
    lines = [_count(plan)]
    for job in plan.all:
        settings = " ".join(_setting(*setting) for setting in job.point.settings)
        lines.append(f"  {_state(job):5}  {job.name}  {settings}".rstrip())
    return "\n".join(lines)


def _record(job: Job) -> dict[str, object]:
    place = {"run": job.name, "directory": str(job.directory), "replicate": job.replicate}
    return place | {"state": _state(job), "updates": job.updates, "settings": dict(job.point.settings)}


def _state(job: Job) -> str:
    return "done" if job.is_done() else "begun" if (job.directory / "recipe.toml").exists() else "to do"


def _setting(name: str, value: object) -> str:
    return quoted(f"{name}={value if isinstance(value, str) else json.dumps(value)}")


def _count(plan: SweepPlan) -> str:
    updates = sum(job.updates for job in plan.jobs)
    shared = f", on the rollouts of {len(plan.bases)} more" if plan.bases else ""
    done = sum(job.is_done() for job in plan.all)
    points, replicates = len(plan.table.points()), len({job.replicate for job in plan.jobs})
    runs = f"{len(plan.jobs)} runs ({points} points, {replicates} of each), {updates} updates{shared}"
    return f"{runs}; {done} of {len(plan.all)} are done"


def sweep(path: Path, output: Path, jobs: int | None = None, as_json: bool = False) -> str:
    """Make the missing runs of a sweep, ``jobs`` at a time, and write the results of all; returns the table.

    jobs: default 2, but 1 on GPUs, all of which each run takes.
    All settings are checked before the first run starts. If a run fails, the others are still made; the next call tries
    the failed one again. Raises `UserError` or `PhaseFailed` at the end, with a line for each run that failed.
    """
    plan = plan_sweep(load_sweep(path), output)
    _say(_count(plan))
    failed: dict[str, BaseException] = {}
    if missing := [job for job in plan.all if not job.is_done()]:
        on_gpus = any(job.recipe.actor.backend == "cuda" for job in missing)
        with Workers(jobs or (1 if on_gpus else 2), plan.output / "logs") as workers:
            _check(workers, missing)
            failed = _make(workers, missing)
    with open(plan.output / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of several sweeps at once, the last to write includes the runs of all
        finished = read_finished(plan)
        found = rows(plan, finished)
        write_atomic(plan.output / "runs.csv", runs_csv(plan, finished))
        write_atomic(plan.output / "table.csv", table_csv(plan, found))
    _say(f"wrote runs.csv and table.csv to {plan.output}")
    if failed:
        print(table_text(plan, found))
        lines = [f"{len(failed)} runs failed; start the same command again to retry them:"]
        lines += [f"  {name}: {_first_line(error)}" for name, error in failed.items()]
        mistakes = all(isinstance(error, UserError) for error in failed.values())
        raise (UserError if mistakes else PhaseFailed)("\n".join(lines))
    return json.dumps(as_records(found)) if as_json else table_text(plan, found)


def _say(line: str) -> None:
    print(escape(line), file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _check(workers: Workers, missing: list[Job]) -> None:
    """`UserError` if the settings of a point cannot run; one replicate of each point is checked."""
    first = {job.point.name: job for job in reversed(missing)}
    wrong = []
    for job, error in workers.process(check_run, list(first.values()), lambda job: True):
        if error:
            wrong.append(f"  {job.name}: {error}")
    if wrong:
        raise UserError("the sweep cannot start, since these runs have mistakes:\n" + "\n".join(wrong))


def _make(workers: Workers, missing: list[Job]) -> dict[str, BaseException]:
    """Make the missing runs and print a line for each that ends; returns the errors of those that fail, by name."""
    failed: dict[str, BaseException] = {}
    for ended, (job, error) in enumerate(workers.process(make_run, missing, Job.is_possible), 1):
        if isinstance(error, Busy):
            text = "is being made by another process"
        elif error:
            failed[job.name] = error
            text = f"failed: {_first_line(error)}"
        else:
            text = f"done in {job.seconds:.0f} s"
        _say(f"[{ended}/{len(missing)}] {job.name}  {text}")
    return failed
