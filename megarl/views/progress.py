"""What a person sees while a phase runs: a live display on a terminal, plain lines elsewhere.

It belongs to the process that starts the phases and only follows files of the run directory, so it cannot disturb
training: events.jsonl, metrics.jsonl and the ledgers of the stage that is generated. Each look reads only what was
appended since the last.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megarl.recipe.eval_table import HELDOUT
from megarl.recipe.tables import Recipe
from megarl.storage.json_lines import JsonTail
from megarl.views.run_reader import half_width

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

POLL_SECONDS = 1.0
LINE_SECONDS = 10.0  # between two plain lines about a phase; phases and evaluations have lines of their own
METRICS_BYTES = 1 << 20  # of the metrics of earlier updates, more than those of the last RATE_UPDATES
RATE_UPDATES = 32  # updates that the current reward and speed are averaged over
GENERATES = ("rollout", "evaluate")  # the phases that begin with the load of an engine
TRAINS = ("optimize", "live")  # the phases that make updates
SHOWN = {"loss": "loss", "grad_norm": "grad_norm", "staleness": "lag", "ess": "ess", "clip_fraction": "clipped"}
ANNOUNCED = (
    "phase_start",
    "phase_end",
    "phase_failed",
    "phase_stopped",
    "restart",
    "no_progress",
    "learns_nothing",
    "resume",
    "evaluation",
    "dynamic_sampling",
    "partial_rollouts",
    "damaged_checkpoint",
    "restored_metrics",
)


class RunState:
    """How far a run is, as its files tell."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self.run_dir, self.schedule, self.candidates = run_dir, recipe.schedule, recipe.candidates_per_stage
        self._unit = "groups" if self.candidates == recipe.groups_per_stage else "candidates"
        self.phase, self.stage, self.phase_since = "", 0, 0.0
        self.doing = ""  # "loading" or "evaluating", where a phase with engines is not yet at its own work
        self.work_since = 0.0  # the start of that work, or of the phase
        self.accuracies: dict[int, tuple[float, float]] = {}  # update -> accuracy on the first suite, half an interval
        self._suite = next((suite.name for suite in recipe.suites), HELDOUT)
        self.seconds: dict[str, float] = {}  # phase -> duration of the last one that ended
        self.recent: deque[dict[str, Any]] = deque(maxlen=RATE_UPDATES)
        self._replicas: dict[int, dict[str, Any]] = {}  # the last `rollout_progress` of each in the current phase
        self._events, self._metrics = (
            JsonTail(run_dir / "events.jsonl"),
            JsonTail(run_dir / "metrics.jsonl", METRICS_BYTES),
        )
        self._ledgers: dict[Path, JsonTail] = {}
        self._shards: dict[str, tuple[int, int, int, float]] = {}  # shard -> groups, responses, tokens, sum of rewards
        self._begins = False  # a phase that `poll` has not looked at
        self._shards_before: set[str] = set()  # of an earlier, killed attempt: no measure of speed

    def poll(self) -> list[dict[str, Any]]:
        """Read what is new; return the new events that are worth a line."""
        events = self._events.read()[1]
        for event in events:
            self._apply(event)
        if self._begins:
            self._begins = False
            if self.phase == "rollout":
                self._read_ledgers()
            self._shards_before = set(self._shards)
        anew, updates = self._metrics.read()
        if anew:
            self.recent.clear()
        self.recent.extend(update for update in updates if isinstance(update.get("update"), int))
        if self.phase == "rollout":
            self._read_ledgers()
        return [event for event in events if event.get("event") in ANNOUNCED]

    def _apply(self, event: dict[str, Any]) -> None:
        kind, stage = event.get("event"), event.get("stage", 0)
        if kind == "phase_start":
            self.phase, self.stage = str(event.get("phase")), stage
            self.phase_since = self.work_since = event.get("time", time.time())
            self.doing = "loading" if self.phase in GENERATES else ""
            self._ledgers, self._shards, self._replicas, self._begins = {}, {}, {}, True
        elif kind == "restart" and self.phase in GENERATES:
            self.doing = "loading"
        elif kind == "weight_drift" and self.doing == "loading":  # the first engine is there
            self.doing = "" if event.get("phase") == self.phase else "evaluating"
            self.work_since = event.get("time", self.work_since)
        elif kind in ("phase_end", "phase_failed", "phase_stopped"):
            self.phase = ""
            if kind == "phase_end" and event.get("phase") != "rehearse":  # which is no part of a stage
                self.seconds[str(event.get("phase"))] = float(event.get("seconds", 0.0))
        elif kind == "rollout_progress":
            self._replicas[event.get("rank", 0)] = event
        elif kind == "evaluation" and "accuracy" in event:
            self.doing, self.work_since = "", event.get("time", self.work_since)
            if event.get("suite", self._suite) == self._suite:
                self.accuracies[_version(event, self)] = event["accuracy"], half_width(event)

    def _read_ledgers(self) -> None:
        for path in (self.run_dir / f"stages/{self.stage:03d}/rollouts").rglob("ledger*.jsonl"):
            rewarded = path.parent.name == "rollouts"  # unfinished ones have no reward yet
            for entry in self._ledgers.setdefault(path, JsonTail(path)).read()[1]:
                counts = len(entry.get("groups", ())), entry.get("responses", 0) * rewarded, entry.get("tokens", 0)
                self._shards[f"{path.parent.name}/{entry.get('shard')}"] = (*counts, entry.get("reward_sum", 0.0))

    @property
    def updates(self) -> int:
        """Updates made so far in the whole run."""
        return self.recent[-1]["update"] if self.recent else 0

    @property
    def done(self) -> tuple[int, int, str]:
        """(amount done, total, unit) of the current phase."""
        if self.phase == "rollout":
            done = sum(shard[0] for shard in self._shards.values())
            return min(done, self.candidates), self.candidates, self._unit
        if self.phase in TRAINS:
            size = self.schedule.updates_per_stage
            return min(size, max(0, self.updates - self.stage * size)), size, "updates"
        return 0, 0, ""

    @property
    def reward(self) -> float | None:
        """Mean reward: of the stage while it is generated, else of the last updates."""
        if self.phase == "rollout":
            responses = sum(shard[1] for shard in self._shards.values())
            return sum(shard[3] for shard in self._shards.values()) / responses if responses else None
        return _mean("reward/mean", self._recent_of_stage)

    @property
    def _recent_of_stage(self) -> list[dict[str, Any]]:
        """Without updates of another stage: these trained on responses of another policy, with other lengths."""
        return [update for update in self.recent if update.get("stage", self.stage) == self.stage]

    def of_replicas(self, name: str) -> float:
        """Sum over the replicas of what each last reported in the current phase, restarts included."""
        return sum(replica.get(name, 0) for replica in self._replicas.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Of the current phase: response tokens generated since it began, or trained in the last updates."""
        if self.phase == "rollout":
            tokens = sum(shard[2] for name, shard in self._shards.items() if name not in self._shards_before)
            return tokens / max(1e-3, time.time() - self.work_since) if tokens else None
        seconds = sum(update.get("seconds", 0.0) for update in self._recent_of_stage)
        return sum(update.get("tokens", 0) for update in self._recent_of_stage) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate for the current phase; None where there is nothing to estimate from."""
        done, total, _ = self.done
        if self.phase in TRAINS:
            pace = _mean("seconds", self.recent)
            return None if pace is None else (total - done) * pace
        if self.phase == "rollout":
            mine = sum(shard[0] for name, shard in self._shards.items() if name not in self._shards_before)
            return (total - done) * (time.time() - self.work_since) / mine if mine else None
        known = self.seconds.get(self.phase)
        return None if known is None else max(0.0, self.phase_since + known - time.time())

    @property
    def run_seconds_left(self) -> float | None:
        """Estimate for the whole run; None until each kind of phase has shown how long it takes."""
        left = self.seconds_left if self.phase else 0.0
        if self.stage == self.schedule.stages:
            return left  # the final evaluation
        parts = ("live",) if self.schedule.kind == "live" else ("rollout", "optimize")
        if left is None or not set(parts) <= self.seconds.keys():
            return None
        after = (
            parts if self.phase == "evaluate" else parts[parts.index(self.phase) + 1 :] if self.phase in parts else ()
        )
        whole = sum(self.seconds.values()) * (self.schedule.stages - 1 - self.stage)
        last = self.seconds.get("evaluate", 0.0) if self.accuracies else 0.0
        return left + sum(self.seconds[phase] for phase in after) + whole + last


def _mean(name: str, updates: Iterable[dict[str, Any]]) -> float | None:
    values = [update[name] for update in updates if isinstance(update.get(name), (int, float))]
    return sum(values) / len(values) if values else None


class Progress:
    """``with Progress(run_dir, recipe): ...`` shows the run until the block ends, whichever way it ends."""

    def __init__(self, run_dir: Path, recipe: Recipe, stream: TextIO | None = None) -> None:
        self._state = RunState(Path(run_dir), recipe)
        self._stream = stream or sys.stdout
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._state.poll()  # what is there already is not announced
        self._view: _Terminal | _Lines = _Terminal(self._stream) if _is_terminal(self._stream) else _Lines(self._stream)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        self._view.close()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        for event in self._state.poll():
            if line := describe_event(event, self._state):
                self._view.announce(line)
        self._view.show(self._state)


def _is_terminal(stream: TextIO) -> bool:
    if "SLURM_STEP_ID" in os.environ and "SLURM_PTY_PORT" not in os.environ:
        return False  # an unbuffered srun puts a terminal between the job and its output file
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class _Lines:
    """For output that is no terminal: one plain line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._next = stream, time.monotonic() + LINE_SECONDS

    def announce(self, line: str) -> None:
        print(time.strftime("%H:%M:%S"), line, file=self._stream, flush=True)
        self._next = time.monotonic() + LINE_SECONDS

    def show(self, state: RunState) -> None:
        if state.phase and time.monotonic() >= self._next:
            self.announce(describe_state(state))

    def close(self) -> None:
        self._stream.flush()


class _Terminal:
    """A few lines that stay at the bottom of the terminal; what is printed meanwhile scrolls above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def announce(self, line: str) -> None:
        self._console.print(line, markup=False)

    def show(self, state: RunState) -> None:
        self._live.update(_panel(state), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _panel(state: RunState) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=32)
    table.add_column(no_wrap=True, overflow="ellipsis")
    done, total, unit = state.done
    updates, all_updates = state.updates, state.schedule.total_updates
    if state.phase:
        bar = ProgressBar(total or None, done, width=32, pulse=False) if total else ""
        amount = f"{done}/{total} {unit}  " if total else ""
        table.add_row(_current_place(state), bar, amount + _left(state.seconds_left))
    amount = f"{updates}/{all_updates} updates  {_left(state.run_seconds_left)}"
    table.add_row("run", ProgressBar(all_updates, updates, width=32), amount)
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row("  ".join(_facts(state)), style="dim")
    return grid


def describe_event(event: dict[str, Any], state: RunState) -> str:
    """One line about an event; "" for those that only repeat another."""
    kind, stage, phase = event["event"], event.get("stage", 0), event.get("phase", "")
    place = _place(stage, phase, state)
    if kind == "evaluation" and "accuracy" in event:
        version, suite = _version(event, state), event.get("suite", HELDOUT)
        whose = "base model" if version == 0 else f"after {version} updates"
        name = "held-out" if suite == HELDOUT else suite
        estimate = f"{event['accuracy']:.3f} +- {half_width(event):.3f} ({event.get('prompts', '?')} prompts)"
        return f"{name} accuracy {estimate}, {whose}"
    if kind == "resume" and phase == "train":
        return f"continues after {event['skipped']} of {event['total']} stages"
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
    if kind == "no_progress":
        return f"{place}: {event.get('cause', 'no progress')}"
    if phase == "evaluate":
        return f"evaluation of stage {stage} failed" if kind == "phase_failed" else ""
    what = {
        "phase_end": f"done in {_clock(event.get('seconds', 0.0))}",
        "phase_failed": "failed",
        "phase_stopped": "stopped",
        "restart": f"restarts: {event.get('cause', 'a process failed')}",
        "resume": f"continues, skips {event.get('skipped')} of {event.get('total')} {event.get('unit')} made earlier",
    }
    return f"{place} {what.get(kind, 'starts')}"


def _version(event: dict[str, Any], state: RunState) -> int:
    """Updates of the policy that an evaluation is of."""
    return int(event.get("update", event.get("stage", 0) * state.schedule.updates_per_stage))


def _place(stage: int, phase: str, state: RunState) -> str:
    stages = state.schedule.stages
    if phase == "rehearse":
        return "rehearsal of an update"
    return "final evaluation" if stage == stages else f"stage {stage + 1}/{stages} {phase}"


def _current_place(state: RunState) -> str:
    waits = {"loading": f": loading weights, {_clock(time.time() - state.phase_since)}", "evaluating": ": evaluating"}
    return _place(state.stage, state.phase, state) + waits.get(state.doing, "")


def describe_state(state: RunState) -> str:
    """One line about the current phase."""
    done, total, unit = state.done
    parts = [_current_place(state)]
    if total:
        parts.append(f"{done}/{total} {unit}")
    parts += _facts(state)
    if state.seconds_left is not None:
        parts.append(_left(state.seconds_left))
    return ", ".join(parts)


def _facts(state: RunState) -> list[str]:
    facts = []
    if (reward := state.reward) is not None:
        facts.append(f"reward {reward:.3f}")
    if state.accuracies:
        first, (last, half) = state.accuracies[min(state.accuracies)][0], state.accuracies[max(state.accuracies)]
        facts.append(
            f"held-out {first:.3f} -> {last:.3f} +- {half:.3f}" if len(state.accuracies) > 1 else f"held-out {last:.3f}"
        )
    if (rate := state.tokens_per_second) and state.phase in ("rollout", *TRAINS):
        facts.append(f"{rate:,.0f} tokens/s")
    if state.phase in ("rollout", "live") and (responses := state.of_replicas("responses")):
        facts += [
            f"length {state.of_replicas('tokens') / responses:.0f}",
            f"truncated {state.of_replicas('truncated') / responses:.0%}",
            f"decoding {state.of_replicas('decoding'):.0f}",
        ]
        if over := state.of_replicas("over_limit"):
            facts.append(f"over the verifier's limits {over:.0f}")
    if state.recent and state.phase in TRAINS and state.recent[-1].get("stage", state.stage) == state.stage:
        newest = state.recent[-1]
        facts += [f"{text} {newest[name]:.3g}" for name, text in SHOWN.items() if newest.get(name) is not None]
        if state.phase == "live":
            idle, all_ = (sum(update.get(n, 0.0) for update in state.recent) for n in ("idle_seconds", "seconds"))
            facts.append(f"trainer idle {idle / max(all_, 1e-3):.0%}")
    return [*facts, f"elapsed {_clock(time.time() - state.phase_since)}"] if state.phase and not state.doing else facts


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{_clock(seconds)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
