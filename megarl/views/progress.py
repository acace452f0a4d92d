"""The progress display of a run: a line for each event, and now and then one about the state.

It runs in the process that starts the phases and only reads events.jsonl and metrics.jsonl, so it cannot disturb
training. Each poll reads only lines that were appended since the last.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from megarl.foreign import escape
from megarl.recipe.eval_table import HELDOUT
from megarl.recipe.tables import Recipe
from megarl.views.run_reader import half_width
from megarl.views.run_state import RunState, find_phase

POLL_SECONDS = 1.0
LINE_SECONDS = 10.0  # between two plain lines about the state; events get lines of their own at once
SHOWN = {"loss": "loss", "grad_norm": "grad_norm", "staleness": "lag", "ess": "ess", "clip_fraction": "clipped"}


class Progress:
    """``with Progress(run_dir, recipe): ...`` shows the run until the block ends, normally or by an exception."""

    def __init__(self, run_dir: Path, recipe: Recipe, stream: TextIO | None = None) -> None:
        self._state = RunState(Path(run_dir), recipe)
        self._stream = stream or sys.stdout
        self._next = 0.0  # when a line about the state is due, by the monotonic clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._state.poll()  # earlier events are not announced
        self._next = time.monotonic() + LINE_SECONDS
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        for event in self._state.poll():
            if line := describe_event(event, self._state):
                self._print(line)
        if self._state.phase and time.monotonic() >= self._next:
            self._print(describe_state(self._state))

    def _print(self, line: str) -> None:
        print(time.strftime("%H:%M:%S"), escape(line), file=self._stream, flush=True)
        self._next = time.monotonic() + LINE_SECONDS


def describe_event(event: dict[str, Any], state: RunState) -> str:
    """One line about an event; "" for one that people need not know, or that only repeats another one."""
    kind, stage, phase = event.get("event"), event.get("stage", 0), event.get("phase", "")
    place = _place(stage, phase, state)
    if kind == "evaluation":
        version, suite = event["update"], event["suite"]
        whose = "base model" if version == 0 else f"after {version} updates"
        name = "held-out" if suite == HELDOUT else suite
        estimate = f"{event['accuracy']:.3f} +- {half_width(event):.3f} ({event.get('prompts', '?')} prompts)"
        return f"{name} accuracy {estimate}, {whose}{_over(event)}"
    if kind == "resume" and phase == "train":
        return f"resumes after {event['skipped']} of {event['total']} stages"
    if kind == "dynamic_sampling":
        filled = f", {event['filled']} of them without variance" if event["filled"] else ""
        return f"{place} chose {event['chosen']} of {event['generated']} groups{filled}"
    if kind == "partial_rollouts":
        return f"{place} chose {event['chosen']} of {event['candidates']} groups, carries {event['carried']} on"
    if kind == "restored_metrics":
        return f"metrics.jsonl was damaged: restored {event['updates']} updates from the checkpoints"
    if kind == "damaged_checkpoint":
        return f"{place}: {event['checkpoint']} is damaged ({event['damage']}), so it is kept as {event['kept_as']}"
    if kind == "learns_nothing":
        return f"{place.strip()} learns nothing, updates {event['first']} to {event['update']}: {event['cause']}"
    if event.get("warning") and event.get("rank") == 0:
        return f"{place}: {event['warning']}"
    if kind == "no_progress":
        return f"{place}: {event.get('cause', 'no progress')}"
    if phase == "evaluate":
        return f"evaluation of stage {stage} failed" if kind == "phase_failed" else ""
    if kind == "phase_end":
        return f"{place} done in {_clock(event.get('seconds', 0.0))}{_over(event)}"
    what = {
        "phase_start": "starts",
        "phase_failed": "failed",
        "phase_stopped": "stopped",
        "restart": f"restarts: {event.get('cause', 'a process failed')}",
        "resume": f"continues, skips {event.get('skipped')} of {event.get('total')} {event.get('unit')} made earlier",
    }
    return f"{place} {what[kind]}" if kind in what else ""


def _place(stage: int, phase: str, state: RunState) -> str:
    stages = state.schedule.stages
    if title := find_phase(phase).title:
        return title
    return "final evaluation" if stage == stages else f"stage {stage + 1}/{stages} {phase.replace('_', '-')}"


def describe_state(state: RunState) -> str:
    """One line about the current phase."""
    done, total, unit = state.done
    parts = [_place(state.stage, state.phase, state) + ": evaluating" * (state.evaluates and state.phase != "evaluate")]
    if total:
        parts.append(f"{done}/{total} {unit}")
    if (reward := state.reward) is not None:
        parts.append(f"reward {reward:.3f}")
    if rate := state.tokens_per_second:
        parts.append(f"{rate:,.0f} tokens/s")
    parts += _responses(state)
    for newest in state.updates[-1:]:
        parts += [f"{text} {newest[name]:.3g}" for name, text in SHOWN.items() if newest.get(name) is not None]
    parts.append(f"elapsed {_clock(time.time() - state.phase_since)}")
    seconds = state.seconds_left
    if seconds and round(seconds):  # once the estimate is used up, the rest takes longer than was known
        parts.append(f"{_clock(seconds)} left")
    return ", ".join(parts)


def _responses(state: RunState) -> list[str]:
    ended, complete = state.of_replicas("ended"), state.of_replicas("responses")
    facts = []
    if ended:
        facts += [f"responses {ended:,.0f}", f"length {state.of_replicas('tokens') / ended:.0f}"]
    if complete:
        facts.append(f"truncated {state.of_replicas('truncated') / complete:.0%}")
    if decoding := state.of_replicas("decoding"):
        facts.append(f"decoding {decoding:.0f}")
    if over := state.of_replicas("over_limit"):
        facts.append(f"over the verifier's limits {over:.0f}")
    if discarded := state.of_replicas("discarded"):
        facts.append(f"faulty responses generated again {discarded:.0f}")
    return facts


def _over(event: dict[str, Any]) -> str:
    over = event.get("over_limit", 0)
    return f", {over:.0f} responses scored 0 because the verifier reached its limits" if over else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
