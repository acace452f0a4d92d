"""The progress of a run, read from its files as they grow; `megarl.views.progress` displays it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.phases import PHASES, Phase
from megarl.recipe.eval_table import HELDOUT
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import JsonTail
from megarl.views.run_reader import half_width

RATE_UPDATES = 32  # updates that the current reward and speed are averaged over


class RunState:
    """The progress of a run; `poll` brings it up to date."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self.schedule, self.candidates = recipe.schedule, recipe.candidates_per_stage
        self._unit = "groups" if self.candidates == recipe.groups_per_stage else "candidates"
        self.phase, self.stage, self.phase_since = "", 0, 0.0
        self.doing = ""  # "loading" or "evaluating" while a phase with engines has not begun its own work
        self.accuracies: dict[int, tuple[float, float]] = {}  # update -> accuracy on the first suite, half its interval
        self._suite = next((suite.name for suite in recipe.suites), HELDOUT)
        self.seconds: dict[str, float] = {}  # phase -> duration of the last one that ended
        self.recent: deque[dict[str, Any]] = deque(maxlen=RATE_UPDATES)
        self._compared = 0, 0  # gradients of a what-if: done, all
        self._replicas: dict[int, dict[str, Any]] = {}  # each one's last progress in this phase or evaluation
        self._events = JsonTail(run_dir / "events.jsonl")
        self._metrics = JsonTail(run_dir / "metrics.jsonl")
        self._skipped = 0  # groups that earlier attempts at the phase or the evaluation have stored

    def poll(self) -> list[dict[str, Any]]:
        """Read the new lines of all files; returns the new events."""
        events = self._events.read()[1]
        for event in events:
            self._apply(event)
        truncated, updates = self._metrics.read()
        if truncated:
            self.recent.clear()
        self.recent.extend(update for update in updates if isinstance(update.get("update"), int))
        return events

    def _apply(self, event: dict[str, Any]) -> None:
        kind, stage = event.get("event"), event.get("stage", 0)
        if kind == "phase_start":
            self.phase, self.stage = str(event.get("phase")), stage
            self.phase_since = event.get("time", time.time())
            self.doing = "loading" if self._begins_by_loading else ""
            self._replicas, self._skipped = {}, 0
        elif kind == "restart":
            self._replicas, self._skipped = {}, 0
            if self._begins_by_loading:
                self.doing = "loading"
        elif kind == "weight_drift" and self.doing == "loading":  # the first engine has loaded
            self.doing = "evaluating" if event.get("phase") == "evaluate" != self.phase else ""
        elif kind in ("phase_end", "phase_failed", "phase_stopped"):
            self.phase = ""
            event["over_limit"] = self.of_replicas("over_limit")
            if kind == "phase_end":
                self.seconds[str(event.get("phase"))] = float(event.get("seconds", 0.0))
        elif kind == "resume":
            self._skipped = event["skipped"]
        elif kind in ("rollout_progress", "evaluation_progress"):
            self._replicas[event.get("rank", 0)] = event
            if kind == "rollout_progress":
                self.doing = ""
        elif kind == "what_if_progress":
            self._compared = event["done"], event["total"]
        elif kind == "evaluation":
            self._replicas, self._skipped = {}, 0  # what follows counts from 0
            if event["suite"] == self._suite:
                self.accuracies[event["update"]] = event["accuracy"], half_width(event)

    @property
    def _begins_by_loading(self) -> bool:
        phase = find_phase(self.phase)
        return phase.engine and not phase.actor

    @property
    def evaluates(self) -> bool:
        """Whether a policy is being evaluated."""
        return self.phase == "evaluate" or self.doing == "evaluating"

    @property
    def done(self) -> tuple[int, int, str]:
        """(amount done, total, unit) of the current phase."""
        if self.evaluates:  # a suite may have fewer prompts than the recipe asks for
            prompts = max((replica["prompts"] for replica in self._replicas.values()), default=0)
            return self._skipped + self._groups, prompts, "prompts"
        if self.phase == "rollout":
            # groups that are continued beyond their token budget count twice
            return min(self.candidates, self._skipped + self._groups), self.candidates, self._unit
        if find_phase(self.phase).updates:
            size, updates = self.schedule.updates_per_stage, self.recent[-1]["update"] if self.recent else 0
            return min(size, max(0, updates - self.stage * size)), size, "updates"
        if self.phase == "what_if":
            return (*self._compared, "gradients")
        return 0, 0, ""

    @property
    def reward(self) -> float | None:
        """Mean reward: of the stage's responses while it is generated, else of the last updates."""
        if self.phase == "rollout" and not self.evaluates:
            responses = self.of_replicas("responses")
            return self.of_replicas("reward_sum") / responses if responses else None
        return _mean("reward/mean", self._recent_of_stage)

    @property
    def _recent_of_stage(self) -> list[dict[str, Any]]:
        """The recent updates of this stage; those of another trained on responses of other lengths."""
        return [update for update in self.recent if update.get("stage", self.stage) == self.stage]

    def of_replicas(self, name: str) -> float:
        """Sum over the replicas of a number in their last report of the current attempt at the phase."""
        return sum(replica.get(name, 0) for replica in self._replicas.values())

    @property
    def _groups(self) -> int:
        """Groups that the current attempt has generated, complete or up to their token budget."""
        return round(self.of_replicas("groups") + self.of_replicas("unfinished"))

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the current phase: response tokens generated since it began, or tokens of the last updates."""
        if self.phase in ("rollout", "evaluate"):
            return self.of_replicas("tokens_per_second") or None
        seconds = sum(update.get("seconds", 0.0) for update in self._recent_of_stage)
        return sum(update.get("tokens", 0) for update in self._recent_of_stage) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate for the current phase, or for the suite that is being evaluated; None if nothing is known."""
        done, total, _ = self.done
        if find_phase(self.phase).updates:
            pace = _mean("seconds", self.recent)
            return None if pace is None else (total - done) * pace
        if self.phase == "what_if":
            return (total - done) * (time.time() - self.phase_since) / done if done else None
        seconds = max((replica["seconds"] for replica in self._replicas.values()), default=0.0)
        return (total - done) * seconds / self._groups if self._groups else None

    @property
    def run_seconds_left(self) -> float | None:
        """Estimate for the whole run without its evaluations; None until each kind of phase has ended once."""
        left, parts = self.seconds_left, self.schedule.phases
        if left is None or self.doing or self.phase not in parts or not set(parts) <= self.seconds.keys():
            return None
        after = parts[parts.index(self.phase) + 1 :] + parts * (self.schedule.stages - 1 - self.stage)
        return left + sum(self.seconds[phase] for phase in after)


def find_phase(phase: object) -> Phase:
    """The entry of a phase in `PHASES`; one without properties for a name that is none, as in another version's run."""
    return PHASES.get(str(phase), Phase(""))


def _mean(name: str, updates: Iterable[dict[str, Any]]) -> float | None:
    values = [update[name] for update in updates if isinstance(update.get(name), (int, float))]
    return sum(values) / len(values) if values else None
