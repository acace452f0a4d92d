"""``megarl sweep``: many runs beside each other, in ordinary run directories, and one table of what came of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import PhaseFailed, UserError
from megarl.recipe.sweep import load_sweep
from megarl.storage.files import write_atomic
from megarl.sweep.cost import remaining, updates_of
from megarl.sweep.figure import write_figure
from megarl.sweep.plan import Job, Plan, make_plan
from megarl.sweep.results import as_records, read_made, rows, runs_csv, table_csv, table_text
from megarl.sweep.workers import Outcome, Workers


def describe(path: Path, output: Path, jobs: int, as_json: bool = False) -> str:
    """What `sweep` would do: every run, its settings and whether it is made, and how long the rest takes.

    as_json: a list of the runs.
    """
    plan = make_plan(load_sweep(path), output)
    if as_json:
        return json.dumps([_record(job) for job in plan.all])
    lines = [_count(plan), *filter(None, [remaining(plan, jobs)])]
    for job in plan.all:
        settings = job.point.settings if job.point else ()
        lines.append(f"  {_state(job):5}  {job.name}  {' '.join(_setting(*setting) for setting in settings)}".rstrip())
    return "\n".join(lines)


def _record(job: Job) -> dict[str, object]:
    settings = dict(job.point.settings) if job.point else {}
    place = {"run": job.name, "directory": str(job.directory), "replicate": job.replicate}
    return place | {"state": _state(job), "updates": updates_of(job), "settings": settings}


def _state(job: Job) -> str:
    return "done" if job.is_done() else "begun" if (job.directory / "recipe.toml").exists() else "to do"


def _setting(name: str, value: object) -> str:
    return shlex.quote(f"{name}={value if isinstance(value, str) else json.dumps(value)}")


def _count(plan: Plan) -> str:
    updates = sum(map(updates_of, plan.jobs))
    shared = f", on the rollouts of {len(plan.bases)} more" if plan.bases else ""
    done = sum(job.is_done() for job in plan.all)
    points, replicates = len(plan.table.points()), len({job.replicate for job in plan.jobs})
    runs = f"{len(plan.jobs)} runs ({points} points, {replicates} of each), {updates} updates{shared}"
    return f"{runs}; {done} of {len(plan.all)} are done"


def sweep(path: Path, output: Path, jobs: int, as_json: bool = False) -> str:
    """Make the runs of a sweep that are not made, so many at a time, and write what came of all; returns the table.

    All settings are checked before a run starts. A run that fails does not keep the others from being made; it is tried
    again by the next call. Raises `UserError` or `PhaseFailed` at the end, with all that failed.
    """
    plan = make_plan(load_sweep(path), output)
    _say(_count(plan))
    failed: list[tuple[Job, Outcome]] = []
    if missing := [job for job in plan.all if not job.is_done()]:
        with Workers(jobs, plan.output / "logs") as workers:
            _check(workers, missing)
            _make(workers, missing, failed)
    with _alone(plan.output):  # of several at once, the last to write has all that any of them made
        made = read_made(plan)
        found = rows(plan, made)
        write_atomic(plan.output / "runs.csv", runs_csv(plan, made))
        write_atomic(plan.output / "table.csv", table_csv(plan, found))
        write_figure(plan, found, plan.output / "figure.html")
    _say(f"wrote runs.csv, table.csv and figure.html to {plan.output}")
    if failed:
        print(table_text(plan, found))
        lines = [f"{len(failed)} runs failed; the same command tries them again:"]
        lines += [f"  {job.name}: {outcome.cause.splitlines()[0]}" for job, outcome in failed]
        mistakes = all(outcome.kind == "mistake" for _, outcome in failed)
        raise (UserError if mistakes else PhaseFailed)("\n".join(lines))
    return json.dumps(as_records(found)) if as_json else table_text(plan, found)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """No other sweep of this directory is here at the same time."""
    with open(directory / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check(workers: Workers, missing: list[Job]) -> None:
    """`UserError` where the settings of a point cannot run: one replicate stands for all."""
    first = {job.point.name if job.point else "": job for job in reversed(missing)}
    wrong = [f"  {job.name}: {found.cause}" for job, found in workers.check(list(first.values())) if found.cause]
    if wrong:
        raise UserError("the sweep is wrong:\n" + "\n".join(wrong))


def _make(workers: Workers, missing: list[Job], failed: list[tuple[Job, Outcome]]) -> None:
    for ended, (job, outcome) in enumerate(workers.make(missing), 1):
        text = f"done in {outcome.seconds:.0f} s" if outcome.kind == "done" else outcome.kind
        if outcome.kind in ("failed", "mistake"):
            failed.append((job, outcome))
            text = f"failed: {outcome.cause.splitlines()[0]}"
        elif outcome.kind == "busy":
            text = "is being made by another process"
        elif outcome.kind == "stopped":
            raise KeyboardInterrupt
        _say(f"[{ended}/{len(missing)}] {job.name}  {text}")
