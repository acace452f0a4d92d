"""The progress of a run, read from its files as they grow; `megarl.views.progress` displays it."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from megarl.phases import PHASES, Phase
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import JsonTail

RATE_UPDATES = 32  # updates that the current reward and speed are averaged over


class RunState:
    """The progress of a run; `poll` brings it up to date."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self.schedule, self.candidates = recipe.schedule, recipe.candidates_per_stage
        self.phase, self.stage, self.phase_since = "", 0, 0.0
        self.evaluates = False  # whether a policy is being evaluated
        self._recent: deque[dict[str, Any]] = deque(maxlen=RATE_UPDATES)
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
            self._recent.clear()
        self._recent.extend(update for update in updates if isinstance(update.get("update"), int))
        return events

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind in ("phase_start", "restart", "evaluation"):
            self._replicas, self._skipped = {}, 0  # what follows counts from 0
        if kind == "phase_start":
            self.phase, self.stage = str(event.get("phase")), event.get("stage", 0)
            self.phase_since = event.get("time", time.time())
            self.evaluates = self.phase == "evaluate"
        elif kind in ("phase_end", "phase_failed", "phase_stopped"):
            self.phase = ""
            event["over_limit"] = self.of_replicas("over_limit")
        elif kind == "resume":
            self._skipped = event["skipped"]
        elif kind in ("rollout_progress", "evaluation_progress"):
            self._replicas[event.get("rank", 0)] = event
            self.evaluates = kind == "evaluation_progress"
        elif kind == "what_if_progress":
            self._compared = event["done"], event["total"]

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The last updates of this stage while it makes updates; those of others had responses of other lengths."""
        if not find_phase(self.phase).updates:
            return []
        return [update for update in self._recent if update.get("stage") == self.stage]

    @property
    def done(self) -> tuple[int, int, str]:
        """(amount done, total, unit) of the current phase."""
        if self.evaluates:  # a suite may have fewer prompts than the recipe asks for
            prompts = max((replica["prompts"] for replica in self._replicas.values()), default=0)
            return self._skipped + self._groups, prompts, "prompts"
        if self.phase == "rollout":
            # groups that are continued beyond their token budget count twice
            return min(self.candidates, self._skipped + self._groups), self.candidates, "groups"
        if find_phase(self.phase).updates:
            size, updates = self.schedule.updates_per_stage, self.updates
            return updates[-1]["update"] - self.stage * size if updates else 0, size, "updates"
        if self.phase == "what_if":
            return (*self._compared, "gradients")
        return 0, 0, ""

    @property
    def reward(self) -> float | None:
        """Mean reward: of the stage's responses while it is generated, else of the last updates."""
        if self.phase == "rollout" and not self.evaluates:
            responses = self.of_replicas("responses")
            return self.of_replicas("reward_sum") / responses if responses else None
        rewards = [update["reward/mean"] for update in self.updates]
        return sum(rewards) / len(rewards) if rewards else None

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
        seconds = sum(update["seconds"] for update in self.updates)
        return sum(update["tokens"] for update in self.updates) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate for the current phase, or for the suite that is being evaluated; None if nothing is known."""
        done, total, _ = self.done
        if updates := self.updates:
            return (total - done) * sum(update["seconds"] for update in updates) / len(updates)
        if self.phase == "what_if":
            return (total - done) * (time.time() - self.phase_since) / done if done else None
        seconds = max((replica["seconds"] for replica in self._replicas.values()), default=0.0)
        return (total - done) * seconds / self._groups if self._groups else None


def find_phase(phase: object) -> Phase:
    """The entry of a phase in `PHASES`; one without properties for a name that is none, as in another version's run."""
    return PHASES.get(str(phase), Phase(""))
