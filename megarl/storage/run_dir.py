"""The run directory: where everything lies, and the rule that one directory holds one recipe."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import Busy, UserError
from megarl.recipe.layout import TRAINING_TABLES, is_layout_setting
from megarl.recipe.load import recipe_diff
from megarl.recipe.tables import Recipe, RolloutTable
from megarl.storage.eras import eras, from_next_stage, remember
from megarl.storage.files import make_directory, remove_directory, write_atomic
from megarl.storage.json_lines import StrictTail, append_json
from megarl.storage.ledger import is_sealed
from megarl.storage.longer import adds_stages, free_result
from megarl.storage.pinned import check_pinned, pin
from megarl.storage.run_recipe import dump, load

# what a run makes once it has a recipe
_CONTENTS = ("stages", "metrics.jsonl", "events.jsonl", "final", "evaluations", "best")
_Evaluations = dict[tuple[int, str], dict[str, Any]]  # by updates and name of the suite


@dataclass(frozen=True)
class RunDir:
    root: Path
    recipe: Recipe
    _newest: RunDir | None = field(default=None, repr=False, compare=False)  # of which this is an earlier recipe
    _evaluations: _Evaluations = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def create(cls, root: Path, recipe: Recipe) -> RunDir:
        """A new or continued run; `UserError` with the difference when the directory belongs to another recipe.

        A run may be continued in another parallel layout, and one that has trained nothing yet with other settings of
        training: a mistake that shows only there costs no rollouts. A staged run may get more stages at any time, and
        what `from_next_stage` says may change from the next stage on.
        """
        root = Path(root).resolve()
        path = root / "recipe.toml"
        if path.exists():
            before = load(path)
            everything = recipe_diff(before, recipe)
            difference = [line for line in everything if not is_layout_setting(line.partition(":")[0])]
            if longer := adds_stages(before, recipe):
                difference = [line for line in difference if not line.startswith("schedule.stages:")]
            if not cls(root, recipe).has_trained() and recipe.actor.routing_replay != "engine":
                difference = [line for line in difference if not line.startswith(TRAINING_TABLES)]
            next_stage = cls(root, before)._next_stage()
            changed = from_next_stage(difference, next_stage.directory, before)
            difference = [line for line in difference if line not in changed]
            if difference:
                raise UserError(
                    f"{root} belongs to a run with another recipe (old -> new):\n  "
                    + "\n  ".join(difference)
                    + "\nuse another --run-dir, or the old settings to continue this one"
                )
            if longer:
                free_result(cls(root, before).final, cls(root, recipe).stage(before.schedule.stages).policy)
            if changed and (kept := remember(root, before, next_stage.number)):
                write_atomic(*kept)
            if everything:  # the event first: after a kill in between it is told twice, and not never
                since = {"stage": next_stage.number} if changed else {}
                cls(root, recipe).log_event("recipe_changed", settings=everything, **since)
                write_atomic(path, dump(recipe))
            cls(root, recipe).check_links()
        else:
            _make_root(root)
            if there := [name for name in _CONTENTS if os.path.lexists(root / name)]:
                raise UserError(
                    f"{root} has {there[0]} of a run, but no recipe.toml that says of which: restore that file from a "
                    "copy, or use another --run-dir"
                )
            write_atomic(path, dump(recipe))
        run = cls(root, recipe)
        pin(run.prompts, recipe)
        return run

    @classmethod
    def open(cls, root: Path) -> RunDir:
        root = Path(root).resolve()
        if not (root / "recipe.toml").exists():
            raise UserError(f"{root} is not a run directory: it has no recipe.toml")
        return cls(root, load(root / "recipe.toml"))

    @property
    def prompts(self) -> Path:
        """The checksums of the prompt files with which the run began."""
        return self.root / "prompts.json"

    def check_prompts(self) -> None:
        """`UserError` where a prompt file is not the one with which the run began."""
        check_pinned(self.prompts, self.recipe)

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @functools.cached_property
    def _new_events(self) -> StrictTail:
        return StrictTail(self.events)

    @property
    def non_finite(self) -> Path:
        """One object for each sequence that made an update not finite."""
        return self.root / "non_finite.jsonl"

    @property
    def base(self) -> Path:
        """The policy with which the run began: it has the configuration and tokenizer of all, and is never removed.

        An actor is built like it; with adapters it is what these stand beside.
        """
        return self.stage(0).policy

    @property
    def final(self) -> Path:
        return self.root / "final"

    @property
    def best(self) -> Path:
        """The policy with the highest accuracy so far."""
        return self.root / "best"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def rehearsal(self) -> Path:
        """What the rehearsal of an update writes; removed after it."""
        return self.root / "rehearsal"

    def stage(self, number: int) -> Stage:
        """A stage of the run; ``schedule.stages`` itself is the end of the run: its policy is the result."""
        if not 0 <= number <= self.recipe.schedule.stages:
            raise UserError(f"stage {number}: this run has stages 0 to {self.recipe.schedule.stages - 1}")
        return Stage(self._era(number), number)

    def _era(self, number: int) -> RunDir:
        """With the recipe under which a stage is made."""
        return next((run for end, run in self.newest._eras if number < end), self.newest)

    @property
    def newest(self) -> RunDir:
        """With the recipe that is in force now; `stage` gives stages with the one under which they were made."""
        return self._newest or self

    @functools.cached_property
    def _eras(self) -> list[tuple[int, RunDir]]:
        return [(end, RunDir(self.root, recipe, self)) for end, recipe in eras(self.root, self.recipe)]

    def _next_stage(self) -> Stage:
        """The first that is not trained, or the end."""
        return next((stage for stage in self.stages() if not stage.is_trained()), self.end)

    def stages(self) -> list[Stage]:
        """All stages, without the end."""
        return [self.stage(number) for number in range(self.recipe.schedule.stages)]

    @property
    def end(self) -> Stage:
        """What comes after the last stage: a policy and its evaluation."""
        return Stage(self, self.recipe.schedule.stages)

    def version(self, version: int) -> Path:
        """Where the policy after ``version`` updates is exported to; between stages it is the stage's own."""
        stage, inside = divmod(version, self.recipe.schedule.updates_per_stage)
        return self.stage(stage).directory / f"policies/{version:06d}" if inside else self.stage(stage).policy

    def versions(self, stages: Iterable[Stage] | None = None) -> list[int]:
        """What is exported at this moment beside the stages' own policies, oldest first; of all stages or some."""
        places = self.root.glob("stages/*") if stages is None else (stage.directory for stage in stages)
        return sorted(int(path.name) for place in places for path in place.glob("policies/[0-9]*"))

    def remove_version(self, version: int) -> None:
        """Of those between stages."""
        remove_directory(self.version(version))

    def remove_versions_after(self, saved: int) -> list[int]:
        """Forget what an earlier attempt exported after later updates than it saved; returns the versions that stay.

        These are made again, perhaps otherwise, the one after exactly ``saved`` updates included.
        """
        for leftover in self.root.glob("stages/*/policies/.*.tmp"):
            shutil.rmtree(leftover)
        versions = self.versions()
        for version in (v for v in versions if v >= saved):
            self.remove_version(version)
        return [v for v in versions if v < saved]

    def under_one_path(self, policy: Path, rank: int) -> Path:
        """``policy`` by a link whose path is the same for every policy that a replica loads.

        What an engine has compiled it finds again by the path of the model, among other things.
        """
        link = self.root / f".policy_{rank:04d}"
        new = link.with_name(f"{link.name}_new")
        new.unlink(missing_ok=True)
        new.symlink_to(policy.relative_to(self.root))
        if link.is_dir() and not link.is_symlink():  # in a copy of a run, made by a tool that follows links
            shutil.rmtree(link)
        new.replace(link)
        return link

    def check_links(self) -> None:
        """`UserError` when the run that this one branched from is no longer where it was."""
        for path in self.root.glob("stages/*/*"):
            if path.is_symlink() and not path.exists():
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, which is not there: the run that this one branched from "
                    "was moved or removed, or has let go of it ([actor] keep_stages, keep_policies). Put it back, or "
                    f"point the link to where it is now: ln -sfn NEW {path}"
                )

    def has_trained(self) -> bool:
        """Whether there is a checkpoint or a live run, whose rollouts come from policies in training."""
        live = self.recipe.schedule.kind == "live"
        return live or any(self.root.glob("stages/*/checkpoints/update_*")) or self.end.policy.exists()

    def log_event(self, event: str, **fields: Any) -> None:
        append_json(self.events, {"time": round(time.time(), 3), "event": event, **fields})

    def evaluations(self) -> _Evaluations:
        """The first recorded evaluation of each policy on each suite, by updates and name of the suite.

        Reads what is new since the last call.
        """
        for event in self._new_events.read():
            if event.get("event") == "evaluation":
                version = event.get("update", event["stage"] * self.recipe.schedule.updates_per_stage)
                self._evaluations.setdefault((version, event.get("suite", self._first_suite)), event)
        return self._evaluations

    @property
    def _first_suite(self) -> str:
        return next((suite.name for suite in self.recipe.suites), "")

    def evaluation(self, version: int, suite: str | None = None) -> dict[str, Any] | None:
        """That of the policy after so many updates, if there is one; by default on the first suite."""
        return self.evaluations().get((version, suite or self._first_suite))

    def lacks_evaluation(self, version: int) -> bool:
        """Whether the policy after so many updates is to be evaluated, and some suite is not done."""
        return self.recipe.is_evaluated(version) and bool(self.unevaluated(version))

    def unevaluated(self, version: int) -> list[str]:
        """The names of the suites on which the policy after so many updates has not been evaluated."""
        return [suite.name for suite in self.recipe.suites if self.evaluation(version, suite.name) is None]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One `megarl` at a time works on a run directory; the kernel releases the lock of a killed one."""
        _make_root(self.root)
        try:
            fd = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise UserError(f"cannot open {error.filename}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 100, 0).decode(errors="replace")
                raise Busy(f"another megarl process works on {self.root} ({owner})") from None
            os.ftruncate(fd, 0)
            os.write(fd, json.dumps({"pid": os.getpid()}).encode())
            yield
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Stage:
    """One stage of a run: a policy answers its prompts, then is optimised on the answers."""

    run: RunDir
    number: int  # from 0

    @property
    def directory(self) -> Path:
        return self.run.root / f"stages/{self.number:03d}"

    @property
    def policy(self) -> Path:
        """The policy that generates in this stage; after the last stage the result of the run."""
        return self.run.final if self.number == self.run.recipe.schedule.stages else self.directory / "policy"

    @property
    def removed_policy(self) -> Path:
        """What is remembered of the policy once `megarl.storage.retention` has removed it."""
        return self.directory / "removed_policy.json"

    @property
    def rollouts(self) -> Path:
        return self.directory / "rollouts"

    @property
    def unfinished(self) -> Path:
        """The groups of which responses reached the token budget, as they were then: see `megarl.storage.carried`."""
        return self.rollouts / "unfinished"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def next(self) -> Stage:
        return self.run.stage(self.number + 1)

    @property
    def previous(self) -> Stage:
        return self.run.stage(self.number - 1)

    @property
    def rollout(self) -> RolloutTable:
        """``[rollout]`` as ``[stages.N]`` changes it."""
        return self.run.recipe.rollout_of(self.number)

    @property
    def groups(self) -> range:
        """Group ids of the stage's candidates, without those that earlier stages began."""
        return self.run.recipe.groups_begun(self.number)

    def groups_of_update(self, groups: Sequence[int], update: int) -> Sequence[int]:
        """Of the stage's trained ``groups`` those of one of its updates, counted from 0.

        Every pass goes through them in the same order, with the same batches. None for an update beyond the stage.
        """
        schedule = self.run.recipe.schedule
        if update >= schedule.updates_per_stage:
            return []
        size, batch = schedule.prompts_per_update, update % schedule.updates_per_pass
        return groups[batch * size : (batch + 1) * size]

    @property
    def first_update(self) -> int:
        """Updates of the run before this stage."""
        return self.number * self.run.recipe.schedule.updates_per_stage

    def is_sealed(self) -> bool:
        return is_sealed(self.rollouts)

    def is_trained(self) -> bool:
        """Whether all updates of the stage are made and exported."""
        return self.next.policy.exists() or self.next.lost_policy()

    def lost_policy(self) -> bool:
        """Whether `megarl.storage.retention` has removed the stage's policy, by the record that it left.

        A record counts only where a policy may go: of a stage that has its rollouts, neither the first nor the end. So
        it says nothing any more in a run from which somebody took the stage's files.
        """
        between = 0 < self.number < self.run.recipe.schedule.stages
        return between and self.is_sealed() and self.removed_policy.exists() and not self.policy.exists()

    def evaluation(self) -> dict[str, Any] | None:
        """The recorded evaluation of the stage's policy on the first suite, if there is one."""
        return self.run.evaluation(self.first_update)

    def due_evaluations(self) -> list[int]:
        """The versions to be evaluated when this stage begins: its policy and those exported during the one before.

        Without a policy that was removed after its evaluation, also where the record of that is lost.
        """
        run = self.run
        published = run.versions([run.stage(self.number - 1)] if self.number else [])
        own = [] if self.lost_policy() else [self.first_update]
        return [v for v in [*published, *own] if run.lacks_evaluation(v)]

    @property
    def oldest_needed(self) -> int:
        """The oldest version of the policy that engines of this stage or a later one may load."""
        schedule, first = self.run.recipe.schedule, self.first_update
        if schedule.kind == "staged" or first == schedule.total_updates or schedule.lag_rule.delay is None:
            return first
        return schedule.lag_rule.exact(first)

    def log_event(self, event: str, **fields: Any) -> None:
        self.run.log_event(event, stage=self.number, **fields)


def _make_root(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file, not a run directory")
    make_directory(root)
