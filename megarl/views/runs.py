"""``megarl runs``: the runs below a directory, their progress and their latest numbers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import UserError
from megarl.foreign import escape
from megarl.views.responses.text import aligned
from megarl.views.run_reader import Run, read_run


@dataclass(frozen=True)
class RunLine:
    """A run in the list."""

    run: str  # path below the directory that is listed
    state: str  # running | finished | failed | stopped | unreadable
    stage: int | None = None  # from 0, of the newest update or phase
    update: int = 0
    updates: int = 0  # number of its last update; for a branch the last of its stage
    accuracy: float | None = None  # of the last evaluation, on the first suite
    reward: float | None = None  # of the newest update, mean


def list_runs(directory: Path) -> list[RunLine]:
    """All runs below ``directory``, and itself if it is one, by path; `UserError` if it is not a directory."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    return [_describe(path, str(path.relative_to(directory))) for path in _find(directory)]


def _find(directory: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(directory):
        below.sort()
        # a recipe beside its model is no run yet: a run has written something
        if "recipe.toml" in files and (
            {"prompts.json", "events.jsonl", "metrics.jsonl"} & {*files} or "stages" in below
        ):
            yield Path(folder)
            below.clear()  # directories inside belong to the run


def _describe(root: Path, name: str) -> RunLine:
    try:
        run = read_run(root, name)
    except UserError:
        return RunLine(name, "unreadable")
    last = run.updates[-1] if run.updates else {}
    phase = next((e for e in reversed(run.events) if str(e.get("event", "")).startswith("phase_")), {})
    evaluations = run.evaluations
    return RunLine(
        name,
        _state(root, run, str(phase.get("event", ""))),
        stage=last.get("stage", phase.get("stage")),
        update=last.get("update", 0),
        updates=run.last,
        accuracy=evaluations[-1]["accuracy"] if evaluations else None,
        reward=last.get("reward/mean"),
    )


def _state(root: Path, run: Run, last_phase: str) -> str:
    """running, finished, failed or stopped.

    A process that works on a run holds its lock. A finished run has its last policy, a finished branch the policy after
    the stage for which it was made.
    """
    if _is_locked(root / ".lock"):
        return "running"
    last = run.own_stages.stop
    if (root / "final" if last == run.stages else root / f"stages/{last:03d}/policy").exists():
        return "finished"
    return "failed" if last_phase == "phase_failed" else "stopped"


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def runs_table(lines: list[RunLine]) -> str:
    """The list as a table for a terminal; stages count from 1 there."""
    rows = [["run", "state", "stage", "update", "accuracy", "reward"]]
    rows += [
        [
            escape(line.run, newlines=False),
            line.state,
            "-" if line.stage is None else str(line.stage + 1),
            f"{line.update:,} / {line.updates:,}",
            "-" if line.accuracy is None else f"{line.accuracy:.3f}",
            "-" if line.reward is None else f"{line.reward:.3f}",
        ]
        for line in lines
    ]
    return "\n".join(aligned(rows))
