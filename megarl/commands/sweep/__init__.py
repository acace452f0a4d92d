"""``megarl sweep``: runs with different settings and seeds, in ordinary run directories, and a table of results."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
import time
from pathlib import Path

from megarl.commands.one_phase import optimize_branch
from megarl.commands.sweep.plan import Job, SweepPlan, plan_sweep
from megarl.commands.sweep.results import as_records, read_finished, rows, runs_csv, table_csv, table_text
from megarl.commands.train import optimizes, train
from megarl.errors import Busy, PhaseFailed, UserError
from megarl.foreign import escape, quoted
from megarl.planner.preflight import check
from megarl.recipe.sweep import load_sweep
from megarl.storage.files import make_directory, write_atomic
from megarl.storage.run_dir import RunDir
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes

POLL_SECONDS = 2.0  # how often to look whether rollouts that another sweep generates are ready


def describe(path: Path, output: Path) -> str:
    """What `sweep` would do: every run with its settings and state."""
    plan = plan_sweep(load_sweep(path), output)
    lines = [_count(plan)]
    for job in plan.all:
        settings = " ".join(_setting(*setting) for setting in job.point.settings)
        lines.append(f"  {_state(job):5}  {job.name}  {settings}".rstrip())
    return "\n".join(lines)


def _state(job: Job) -> str:
    return "done" if job.is_done() else "begun" if (job.directory / "recipe.toml").exists() else "to do"


def _setting(name: str, value: object) -> str:
    return quoted(f"{name}={value if isinstance(value, str) else json.dumps(value)}")


def _count(plan: SweepPlan) -> str:
    shared = f", on the rollouts of {len(plan.bases)} more" if plan.bases else ""
    done = sum(job.is_done() for job in plan.all)
    points, replicates = len(plan.table.points()), len({job.replicate for job in plan.jobs})
    runs = f"{len(plan.jobs)} runs ({points} points, {replicates} of each){shared}"
    return f"{runs}; {done} of {len(plan.all)} are done"


def sweep(path: Path, output: Path, as_json: bool = False) -> str:
    """Make the missing runs of a sweep, one after another, and write the results of all; returns the table.

    All settings are checked before the first run starts. If a run fails, the others are still made; the next call tries
    the failed one again. Raises `UserError` or `PhaseFailed` at the end, with a line for each run that failed. A run
    that another sweep is making is left to it.
    """
    plan = plan_sweep(load_sweep(path), output)
    _say(_count(plan))
    failed: dict[str, Exception] = {}
    if missing := [job for job in plan.all if not job.is_done()]:
        with Nodes(NodeRank()) as nodes, contextlib.redirect_stdout(sys.stderr):
            _check(nodes, missing)
            failed = _make(nodes, missing)
    make_directory(plan.output)
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
        lines += [f"  {name}: {str(error).splitlines()[0]}" for name, error in failed.items()]
        mistakes = all(isinstance(error, UserError) for error in failed.values())
        raise (UserError if mistakes else PhaseFailed)("\n".join(lines))
    return json.dumps(as_records(found)) if as_json else table_text(plan, found)


def _say(line: str) -> None:
    print(escape(line), file=sys.stderr, flush=True)


def _check(nodes: Nodes, missing: list[Job]) -> None:
    """`UserError` if the settings of a point cannot run; one replicate of each point is checked."""
    wrong = []
    for job in {job.point.name: job for job in reversed(missing)}.values():
        nodes.starter.prepare(job.recipe)  # with what all runs need, even if this one only generates
        try:
            check(nodes.starter, job.recipe, optimizes=job.until != 0)
        except (UserError, PhaseFailed) as error:
            wrong.append(f"  {job.name}: {error}")
    if wrong:
        raise UserError("the sweep cannot start, since these runs have mistakes:\n" + "\n".join(wrong))


def _make(nodes: Nodes, missing: list[Job]) -> dict[str, Exception]:
    """Make the missing runs, each once its rollouts exist; returns the errors of those that fail, by name."""
    waiting, elsewhere = list(missing), list[Job]()
    failed: dict[str, Exception] = {}
    while waiting:
        more = any(base.until is not None and not base.is_done() for base in elsewhere)  # rollouts, from another sweep
        if (job := next(filter(Job.is_possible, waiting), None)) is None:
            if not more:
                break
            time.sleep(POLL_SECONDS)
            continue
        waiting.remove(job)
        start = time.monotonic()
        try:
            _make_run(nodes, job)
            text = f"done in {time.monotonic() - start:.0f} s"
        except Busy:
            elsewhere.append(job)
            text = "is being made by another process"
        except (UserError, PhaseFailed, OSError) as error:
            failed[job.name] = error
            text = f"failed: {error}"
        _say(f"[{len(missing) - len(waiting)}/{len(missing)}] {job.name}  {text}")
    return failed


def _make_run(nodes: Nodes, job: Job) -> None:
    """Make or continue a run."""
    if job.is_done():  # another sweep has made it in the meantime
        return
    nodes.starter.prepare(job.recipe)
    if job.source is not None:
        optimize_branch(nodes, job.source, job.directory, job.point.settings)
        return
    until = None if job.until is None else ("rollout", job.until)
    check(nodes.starter, job.recipe, optimizes=optimizes(job.run, until))
    with job.run.lock():
        train(nodes, RunDir.create(job.directory, job.recipe), until)
