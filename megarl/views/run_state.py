"""The progress of a run, read from its files as they grow; `megarl.views.progress` displays it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.phases import PHASES, Phase
from megarl.recipe.eval_table import HELDOUT
from megarl.recipe.tables import Recipe, ScheduleTable
from megarl.storage.checked_json import JsonTail
from megarl.storage.ledger import is_sealed
from megarl.storage.run_dir.evaluations import SuiteResponses
from megarl.views.run_reader import half_width

METRICS_BYTES = 1 << 20  # read from the end of metrics.jsonl at the start: more than RATE_UPDATES lines
RATE_UPDATES = 32  # updates that the current reward and speed are averaged over


class Stored:
    """The shards that the ledgers below a directory name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ledgers: dict[Path, JsonTail] = {}
        self._shards: dict[str, tuple[int, int, float]] = {}  # shard -> groups, responses, sum of rewards

    def poll(self) -> None:
        """Read the new lines."""
        for path in self._directory.rglob("ledger*.jsonl"):
            rewarded = path.parent == self._directory  # those in unfinished/ have no reward yet
            for entry in self._ledgers.setdefault(path, JsonTail(path)).read()[1]:
                counts = len(entry.get("groups", ())), entry.get("responses", 0) * rewarded
                self._shards[f"{path.parent.name}/{entry.get('shard')}"] = (*counts, entry.get("reward_sum", 0.0))

    @property
    def groups(self) -> int:
        return sum(shard[0] for shard in self._shards.values())

    @property
    def reward(self) -> float | None:
        """Mean reward of the responses; None if there are none."""
        responses = sum(shard[1] for shard in self._shards.values())
        return sum(shard[2] for shard in self._shards.values()) / responses if responses else None


class RunState:
    """The progress of a run; `poll` brings it up to date."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self.run_dir, self.schedule, self.candidates = run_dir, recipe.schedule, recipe.candidates_per_stage
        self._recipe = recipe
        self._unit = "groups" if self.candidates == recipe.groups_per_stage else "candidates"
        self.phase, self.stage, self.phase_since = "", 0, 0.0
        self.doing = ""  # "loading" or "evaluating" while a phase with engines has not begun its own work
        self.answered = 0, 0, ""  # of the suite that is being evaluated: prompts answered, all prompts, name
        self._answers: dict[Path, Stored] = {}  # to the suites, by directory
        self.accuracies: dict[int, tuple[float, float]] = {}  # update -> accuracy on the first suite, half its interval
        self._suite = next((suite.name for suite in recipe.suites), HELDOUT)
        self.seconds: dict[str, float] = {}  # phase -> duration of the last one that ended
        self.recent: deque[dict[str, Any]] = deque(maxlen=RATE_UPDATES)
        self._compared = 0, 0  # gradients of a what-if: done, all
        self._replicas: dict[int, dict[str, Any]] = {}  # each one's last progress in this phase or evaluation
        self._events = JsonTail(run_dir / "events.jsonl")
        self._metrics = JsonTail(run_dir / "metrics.jsonl", METRICS_BYTES)
        self._stored = Stored(run_dir)  # rollouts of the stage
        self._begins = False  # whether an attempt at a phase has begun since the last `poll`
        self._groups_before = 0  # stored by earlier, killed attempts

    def poll(self) -> list[dict[str, Any]]:
        """Read the new lines of all files; returns the new events."""
        events = self._events.read()[1]
        for event in events:
            self._apply(event)
        if self._begins:
            self._begins = False
            if self.phase == "rollout":
                self._stored.poll()
            self._groups_before = self._stored.groups
        anew, updates = self._metrics.read()
        if anew:
            self.recent.clear()
        self.recent.extend(update for update in updates if isinstance(update.get("update"), int))
        if self.phase == "rollout":
            self._stored.poll()
        if self.evaluates:
            self.answered = self._being_evaluated()
        return events

    def _being_evaluated(self) -> tuple[int, int, str]:
        """(prompts answered, all prompts, name) of the suite whose evaluation has begun and is not sealed."""
        for suite in self._recipe.suites:
            for place in SuiteResponses.of(self.run_dir, suite.name).directory.glob("update_*"):
                if not is_sealed(place):
                    stored = self._answers.setdefault(place, Stored(place))
                    stored.poll()
                    return stored.groups, suite.prompts, suite.name
        return 0, 0, ""

    def _apply(self, event: dict[str, Any]) -> None:
        kind, stage = event.get("event"), event.get("stage", 0)
        if kind == "phase_start":
            self.phase, self.stage = str(event.get("phase")), stage
            self.phase_since = event.get("time", time.time())
            self.doing = "loading" if self._begins_by_loading else ""
            self.answered = 0, 0, ""
            self._stored = Stored(self.run_dir / f"stages/{stage:03d}/rollouts")
            self._replicas, self._begins = {}, True
        elif kind == "restart":
            self._replicas, self._begins = {}, True
            if self._begins_by_loading:
                self.doing = "loading"
        elif kind == "weight_drift" and self.doing == "loading":  # the first engine has loaded
            self.doing = "evaluating" if event.get("phase") == "evaluate" != self.phase else ""
        elif kind in ("phase_end", "phase_failed", "phase_stopped"):
            self.phase = ""
            event["over_limit"] = self.of_replicas("over_limit")
            if kind == "phase_end":
                self.seconds[str(event.get("phase"))] = float(event.get("seconds", 0.0))
        elif kind in ("rollout_progress", "evaluation_progress"):
            self._replicas[event.get("rank", 0)] = event
            if kind == "rollout_progress":
                self.doing = ""
        elif kind == "what_if_progress":
            self._compared = event["done"], event["total"]
        elif kind == "evaluation" and "accuracy" in event:
            self._replicas = {}  # what follows counts from 0
            if event.get("suite", self._suite) == self._suite:
                self.accuracies[version_of(event, self.schedule)] = event["accuracy"], half_width(event)

    @property
    def _begins_by_loading(self) -> bool:
        phase = find_phase(self.phase)
        return phase.engine and not phase.actor

    @property
    def evaluates(self) -> bool:
        """Whether a policy is being evaluated."""
        return self.phase == "evaluate" or self.doing == "evaluating"

    @property
    def updates(self) -> int:
        """Updates made so far in the whole run."""
        return self.recent[-1]["update"] if self.recent else 0

    @property
    def done(self) -> tuple[int, int, str]:
        """(amount done, total, unit) of the current phase."""
        # a chunk is stored as a whole, but its groups are complete one after another
        if self.evaluates:
            # a suite may have fewer prompts than the recipe asks for
            prompts = max((replica.get("prompts", 0) for replica in self._replicas.values()), default=self.answered[1])
            return max(self.answered[0], round(self.of_replicas("groups"))), prompts, "prompts"
        if self.phase == "rollout":
            done = max(self._stored.groups, self._groups_before + round(self.of_replicas("groups")))
            return min(done, self.candidates), self.candidates, self._unit
        if find_phase(self.phase).updates:
            size = self.schedule.updates_per_stage
            return min(size, max(0, self.updates - self.stage * size)), size, "updates"
        if self.phase == "what_if":
            return (*self._compared, "gradients")
        return 0, 0, ""

    @property
    def reward(self) -> float | None:
        """Mean reward: of the stage's responses while it is generated, else of the last updates."""
        if self.phase == "rollout" and not self.evaluates:
            responses = self.of_replicas("responses")
            now = self.of_replicas("reward_sum") / responses if responses else None
            return now if self._stored.reward is None else self._stored.reward
        return _mean("reward/mean", self._recent_of_stage)

    @property
    def _recent_of_stage(self) -> list[dict[str, Any]]:
        """The recent updates of this stage; those of another trained on responses of other lengths."""
        return [update for update in self.recent if update.get("stage", self.stage) == self.stage]

    def of_replicas(self, name: str) -> float:
        """Sum over the replicas of a number in their last report of the current attempt at the phase."""
        return sum(replica.get(name, 0) for replica in self._replicas.values())

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
        if self.phase == "rollout":
            return self._seconds_of_generation
        if self.phase == "what_if":
            return (total - done) * (time.time() - self.phase_since) / done if done else None
        known = self.seconds.get(self.phase)
        if self.evaluates and known is None:
            return self._seconds_of_generation
        return None if known is None else max(0.0, self.phase_since + known - time.time())

    @property
    def _seconds_of_generation(self) -> float | None:
        """Until all responses of the phase, or of the suite, are generated, by the tokens that the replicas reported.

        Responses that are still being decoded count with the longest allowed length, because short ones end first.
        """
        ended, decoding, tokens = (self.of_replicas(name) for name in ("ended", "decoding", "tokens"))
        rate = self.tokens_per_second
        if not rate or not ended + decoding:
            return None
        responses = (self.candidates - self._groups_before) * self._recipe.rollout.responses_per_prompt
        longest = self._recipe.rollout.max_response_tokens
        if suite := next((suite for suite in self._recipe.suites if suite.name == self.answered[2]), None):
            responses, longest = self.done[1] * suite.samples, suite.max_response_tokens
        length = (tokens + decoding * longest) / (ended + decoding)
        left = (responses * length - tokens - self.of_replicas("decoding_tokens")) / rate
        return max(0.0, left - (time.time() - max(report["time"] for report in self._replicas.values())))

    @property
    def run_seconds_left(self) -> float | None:
        """Estimate for the whole run; None until each kind of phase has ended once."""
        left = self.seconds_left if self.phase else 0.0
        if left is None or self.doing or (self.evaluates and "evaluate" not in self.seconds):
            return None  # the suites that are left are not known
        if self.stage == self.schedule.stages:
            return left  # the final evaluation
        parts = self.schedule.phases
        if not set(parts) <= self.seconds.keys():
            return None
        after = parts[parts.index(self.phase) + 1 :] if self.phase in parts else parts
        whole = sum(self.seconds.values()) * (self.schedule.stages - 1 - self.stage)
        last = self.seconds.get("evaluate", 0.0) if self.accuracies else 0.0
        return left + sum(self.seconds[phase] for phase in after) + whole + last


def find_phase(phase: object) -> Phase:
    """The entry of a phase in `PHASES`; one without properties for a name that is none, as in another version's run."""
    return PHASES.get(str(phase), Phase(""))


def version_of(event: dict[str, Any], schedule: ScheduleTable) -> int:
    """Updates of the policy that an evaluation evaluated."""
    return int(event.get("update", event.get("stage", 0) * schedule.updates_per_stage))


def _mean(name: str, updates: Iterable[dict[str, Any]]) -> float | None:
    values = [update[name] for update in updates if isinstance(update.get(name), (int, float))]
    return sum(values) / len(values) if values else None
