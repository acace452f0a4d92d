"""Estimates from the finished runs of a sweep how long the others take."""

from __future__ import annotations

from collections import defaultdict

from megarl.commands.sweep.plan import Job, Plan
from megarl.storage.checked_json import read_intact_lines


def remaining(plan: Plan, jobs: int) -> str:
    """A sentence with the mean time of a finished run and the time that the others will take, ``jobs`` at a time.

    A run is assumed to take as long as finished runs of its point; if there are none, the mean time per update of all
    finished runs counts. Empty if no run with updates is finished.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    updates = 0
    for job in plan.all:
        if job.is_done():
            seconds[_point(job)].append(_seconds(job))
            updates += updates_of(job)
    if not updates:
        return ""
    finished = [s for point in seconds.values() for s in point]
    per_update = sum(finished) / updates
    means = {point: sum(values) / len(values) for point, values in seconds.items()}
    left = sum(means.get(_point(job), per_update * updates_of(job)) for job in plan.all if not job.is_done())
    minutes = left / jobs / 60
    text = f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return f"a finished run took {sum(finished) / len(finished):.0f} s; the others take about {text}"


def _point(job: Job) -> str:
    return job.point.name if job.point else ""


def updates_of(job: Job) -> int:
    """The number of updates that a run makes; 0 if it ends with rollouts."""
    if job.until is not None:
        return 0
    schedule = job.recipe.schedule
    return schedule.updates_per_stage if job.source else schedule.total_updates


def _seconds(job: Job) -> float:
    """The time that the phases of a run took, without pauses between two starts."""
    events, _ = read_intact_lines(job.run.events)
    ends = ("phase_end", "phase_stopped", "phase_failed")
    return sum(event["seconds"] for event in events if event["event"] in ends)
