"""How long the rest of a sweep takes, by the runs of it that are finished."""

from __future__ import annotations

from collections import defaultdict

from megarl.storage.json_lines import read_intact_lines
from megarl.sweep.plan import Job, Plan


def remaining(plan: Plan, jobs: int) -> str:
    """A sentence: what a finished run took, and what the others will with so many ``jobs`` at a time; "" without one.

    A run takes what the finished ones of its point take, or by its updates what finished ones of other points do.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    updates = 0
    for job in plan.all:
        if job.is_done():
            seconds[_point(job)].append(_seconds(job))
            updates += updates_of(job)
    if not updates:
        return ""
    made = [s for point in seconds.values() for s in point]
    of_update = sum(made) / updates
    means = {point: sum(values) / len(values) for point, values in seconds.items()}
    left = sum(means.get(_point(job), of_update * updates_of(job)) for job in plan.all if not job.is_done())
    minutes = left / jobs / 60
    text = f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return f"a finished run took {sum(made) / len(made):.0f} s; the others take about {text}"


def _point(job: Job) -> str:
    return job.point.name if job.point else ""


def updates_of(job: Job) -> int:
    """That a run makes; none if it ends with rollouts."""
    if job.until is not None:
        return 0
    schedule = job.recipe.schedule
    return schedule.updates_per_stage if job.source else schedule.total_updates


def _seconds(job: Job) -> float:
    """Of its phases, and of no pause between two starts."""
    events, _ = read_intact_lines(job.run.events)
    ends = ("phase_end", "phase_stopped", "phase_failed")
    return sum(event["seconds"] for event in events if event["event"] in ends)
