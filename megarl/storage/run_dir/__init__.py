"""The run directory: the paths in it, the rule that it holds one recipe, and its stages."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from megarl.errors import Busy, UserError
from megarl.foreign import quoted
from megarl.recipe.layout import TRAINING_TABLES, is_layout_setting
from megarl.recipe.load import recipe_diff
from megarl.recipe.tables import Recipe, RolloutTable
from megarl.storage.checked_json import JsonTail, append_json, read_checked, write_checked
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import disk_errors, make_directory, write_atomic
from megarl.storage.ledger import is_sealed, sealed_groups
from megarl.storage.run_dir.recipes import (
    check_files,
    dump,
    from_next_stage,
    load,
    recipes_by_stage,
    record_files,
    refuse_changes,
    write_earlier_recipe,
)

# directories of a branch with another reward, with one entry per stage
SCORED_BEFORE = "scored_before"  # links to the rollouts with their old rewards
RESCORED = "rescored"  # the same rollouts with the new rewards
# what only a run with a recipe can have written
_CONTENTS = ("stages", "metrics.jsonl", "events.jsonl", "final", "evaluations", "best")
_Evaluations = dict[tuple[int, str], dict[str, Any]]  # by version (number of updates) and name of the suite


@dataclass(frozen=True)
class RunDir:
    """A run directory with its newest recipe, or with an earlier one, for the stages that were made with that."""

    root: Path
    recipe: Recipe
    _newest: RunDir | None = field(default=None, repr=False, compare=False)  # set if ``recipe`` is an earlier one
    _evaluations: _Evaluations = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def create(cls, root: Path, recipe: Recipe) -> RunDir:
        """Begin or continue a run; `UserError` with the differences if the directory belongs to another recipe.

        Some differences are allowed: always the parallel layout, and more stages of a staged run; the settings of
        training until the run has trained, so that a mistake in them costs no rollouts; the settings that
        `from_next_stage` returns, from the next stage on.
        """
        root = Path(root).resolve()
        path = root / "recipe.toml"
        if path.exists():
            before = load(path)
            everything = recipe_diff(before, recipe)
            difference = [line for line in everything if not is_layout_setting(line.partition(":")[0])]
            staged = before.schedule.one_policy and recipe.schedule.one_policy
            if longer := staged and recipe.schedule.stages > before.schedule.stages:
                difference = [line for line in difference if not line.startswith("schedule.stages:")]
            if not cls(root, recipe).has_trained() and not recipe.actor.trains_recorded_experts:
                difference = [line for line in difference if not line.startswith(TRAINING_TABLES)]
            next_stage = cls(root, before)._next_stage()
            changed = from_next_stage(difference, next_stage.directory, before)
            if next_stage.number == recipe.schedule.stages:  # no stage would use another setting of training
                changed = [line for line in changed if line.startswith("eval.")]
            refuse_changes(root, [line for line in difference if line not in changed], before)
            if longer and (final := cls(root, before).final).exists():  # it begins the first additional stage
                # before the new recipe is written: after a kill in between, the old one makes ``final`` again
                policy = cls(root, recipe).stage(before.schedule.stages).policy
                make_directory(policy.parent)
                shutil.rmtree(policy, ignore_errors=True)
                final.rename(policy)
            if changed:
                write_earlier_recipe(root, before, next_stage.number)
            if everything:  # event first: a kill in between makes it appear twice, the other order could lose it
                since = {"stage": next_stage.number} if changed else {}
                cls(root, recipe).log_event("recipe_changed", settings=everything, **since)
                write_atomic(path, dump(recipe))
            cls(root, recipe).check_links()
        else:
            make_directory(root)
            if there := [name for name in _CONTENTS if os.path.lexists(root / name)]:
                raise UserError(
                    f"{root} has {there[0]} of a run, but not its recipe.toml: restore that file from a copy, or use "
                    "another --run-dir"
                )
            write_atomic(path, dump(recipe))
        run = cls(root, recipe)
        if files := record_files(run.prompts, recipe, run._unused()):
            run.log_event("recipe_changed", settings=[f"{file}: another content" for file in files])
        return run

    @classmethod
    def open(cls, root: Path) -> RunDir:
        root = Path(root).resolve()
        if not (root / "recipe.toml").exists():
            raise UserError(f"{root} is not a run directory: it has no recipe.toml")
        return cls(root, load(root / "recipe.toml"))

    @property
    def prompts(self) -> Path:
        """The file with the checksums of the prompt files, the user's own Python files and a judge's question."""
        return self.root / "prompts.json"

    def check_prompts(self) -> None:
        """`UserError` if one of these files has changed since the run began."""
        check_files(self.prompts, self.recipe)

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @functools.cached_property
    def _new_events(self) -> JsonTail:
        return JsonTail(self.events, strict=True)

    @property
    def non_finite(self) -> Path:
        """The file with one object for each sequence that made an update's loss or gradient non-finite."""
        return self.root / "non_finite.jsonl"

    @property
    def base(self) -> Path:
        """The policy with which the run began, which is never removed.

        Actors and other policies have its configuration and tokenizer; adapters are trained on top of its weights."""
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
        """The scratch directory of the rehearsal, removed after it."""
        return self.root / "rehearsal"

    def stage(self, number: int) -> Stage:
        """Stage ``number``; ``schedule.stages`` stands for the end of the run, whose policy is the result."""
        if not 0 <= number <= self.recipe.schedule.stages:
            raise UserError(f"stage {number}: this run has stages 0 to {self.recipe.schedule.stages - 1}")
        return Stage(next((run for end, run in self.newest._recipes_by_stage if number < end), self.newest), number)

    @property
    def newest(self) -> RunDir:
        """This run with its newest recipe; `stage` returns stages with the recipe that applies to them."""
        return self._newest or self

    @functools.cached_property
    def _recipes_by_stage(self) -> list[tuple[int, RunDir]]:
        return [(end, RunDir(self.root, recipe, self)) for end, recipe in recipes_by_stage(self.root, self.recipe)]

    def _next_stage(self) -> Stage:
        """The first stage that is not trained, or the end."""
        return next((stage for stage in self.stages() if not stage.is_trained()), self.end)

    def stages(self) -> list[Stage]:
        """All stages, without the end."""
        return [self.stage(number) for number in range(self.recipe.schedule.stages)]

    @property
    def end(self) -> Stage:
        """What follows the last stage: it has a policy, the result, and its evaluation."""
        return Stage(self, self.recipe.schedule.stages)

    def version(self, version: int) -> Path:
        """The path of the policy after ``version`` updates; if a stage begins there, it is the stage's policy."""
        stage, inside = divmod(version, self.recipe.schedule.updates_per_stage)
        return self.stage(stage).directory / f"policies/{version:06d}" if inside else self.stage(stage).policy

    def versions(self) -> list[int]:
        """The policies that exist between the beginnings of stages, oldest first."""
        return sorted(int(path.name) for path in self.root.glob("stages/*/policies/[0-9]*"))

    def under_one_path(self, policy: Path, rank: int) -> Path:
        """A link to ``policy`` whose path is the same for every policy that replica ``rank`` loads.

        The path of the model is part of the key under which an engine caches what it has compiled.
        """
        link = self.root / f".policy_{rank:04d}"
        new = link.with_name(f"{link.name}_new")
        new.unlink(missing_ok=True)
        new.symlink_to(policy.relative_to(self.root))
        if link.is_dir() and not link.is_symlink():  # if the run was copied by a tool that follows links
            shutil.rmtree(link)
        new.replace(link)
        return link

    def check_links(self) -> None:
        """`UserError` if a file of the run that this one branched from is no longer where it was."""
        for path in self.root.glob("stages/*/*"):
            if path.is_symlink() and not path.exists():
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, which does not exist: the run that this one branched "
                    "from was moved or removed, or has removed it ([actor] keep_stages, keep_policies). Put it back, "
                    f"or point the link to where it is now: ln -sfn NEW {path}"
                )

    def start_from(self, checkpoint: Path) -> None:
        """Make this run start from the optimizer state in another run's ``checkpoint``."""
        if not (link := self.root / "start").is_symlink():
            link.symlink_to(checkpoint)

    def start(self) -> Path | None:
        """The checkpoint of another run from which this run starts, if any; `UserError` if it was moved."""
        link = self.root / "start"
        if link.is_symlink() and not link.exists():
            raise UserError(
                f"{link} is a link to {link.readlink()}, the checkpoint from which the run starts: put it back"
            )
        return link.resolve() if link.exists() else None

    def result(self) -> tuple[Path, Path]:
        """(policy, checkpoint) with which this run ended; `UserError` if one of them does not exist."""
        self.check_links()
        last = self.end.previous.checkpoints
        path = dict(checkpoints(last)).get(self.recipe.schedule.updates_per_stage)
        if not self.final.exists() or path is None:
            raise UserError(
                f"--continue-from {self.root}: {self.final} or the last checkpoint in {last} does not exist: that run "
                "is not finished, or keep_stages removed it"
            )
        return self.final, path

    def send(self, name: str, **message: Any) -> None:
        """Store the "request" of a command for the phase that it starts here, or the phase's "answer"."""
        write_checked(self.root / f"{name}.json", message)

    def receive(self, name: str) -> dict[str, Any]:
        """What `send` has stored under this name."""
        return read_checked(self.root / f"{name}.json", "Start the same command again")

    def has_trained(self) -> bool:
        """Whether the run has made updates; always True for live runs, whose rollouts depend on training."""
        if not self.recipe.schedule.one_policy:
            return True
        return any(self.root.glob("stages/*/checkpoints/update_*")) or self.end.policy.exists()

    def _unused(self) -> list[str]:
        """The tables of the recipe with whose own Python files nothing has been made yet."""
        shards = ("stages/*/rollouts/*.arrow", "evaluations/**/*.arrow")
        scored = any(any(self.root.glob(pattern)) for pattern in shards)
        trained = self.has_trained() if self.recipe.schedule.one_policy else scored
        return [table for table, used in (("reward", scored), ("objective", trained)) if not used]

    def log_event(self, event: str, **fields: Any) -> None:
        append_json(self.events, {"time": round(time.time(), 3), "event": event, **fields})

    def evaluations(self) -> _Evaluations:
        """The first recorded evaluation of each policy on each suite, by version and name of the suite.

        Reads only the events that are new since the last call.
        """
        for event in self._new_events.read()[1]:
            if event.get("event") == "evaluation":
                self._evaluations.setdefault((event["update"], event["suite"]), event)
        return self._evaluations

    def evaluation(self, version: int, suite: str | None = None) -> dict[str, Any] | None:
        """The evaluation of the policy after ``version`` updates, if there is one; by default on the first suite."""
        return self.evaluations().get((version, suite or next((suite.name for suite in self.recipe.suites), "")))

    def lacks_evaluation(self, version: int) -> bool:
        """Whether the policy after ``version`` updates should be evaluated but was not on every suite."""
        return self.recipe.is_evaluated(version) and bool(self.unevaluated(version))

    def unevaluated(self, version: int) -> list[str]:
        """The names of the suites on which the policy after ``version`` updates has not been evaluated."""
        return [suite.name for suite in self.recipe.suites if self.evaluation(version, suite.name) is None]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run directory's lock, which the kernel releases when the process dies; `Busy` if another has it."""
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is a file, not a run directory")
        make_directory(self.root)
        path = self.root / ".lock"
        with disk_errors(path):
            file = FileIO(path, "a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = path.read_text(errors="replace")
                raise Busy(f"another megarl process is working on {self.root} ({owner})") from None
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid()}).encode())
            yield


@dataclass(frozen=True)
class Stage:
    """One stage of a run: its policy answers prompts, then it is optimised on the answers."""

    run: RunDir
    number: int  # from 0

    @property
    def directory(self) -> Path:
        return self.run.root / f"stages/{self.number:03d}"

    @property
    def policy(self) -> Path:
        """The policy that generates in this stage; at the end of the run the result."""
        return self.run.final if self.number == self.run.recipe.schedule.stages else self.directory / "policy"

    @property
    def rollouts(self) -> Path:
        return self.directory / "rollouts"

    @property
    def unfinished(self) -> Path:
        """The store of groups with responses that reached the token budget: see `candidates`."""
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
        """The table ``[rollout]`` with this stage's changes of ``[stages.N]``."""
        return self.run.recipe.rollout_of(self.number)

    @property
    def groups(self) -> range:
        """Ids of the groups that this stage begins (its candidates, without those of earlier stages)."""
        return self.run.recipe.groups_begun(self.number)

    def continued_groups(self) -> list[int]:
        """The sorted ids of the groups that earlier stages began and left to this one: see `candidates`.

        `UserError` if the stage before is not sealed, because only its seal names them.
        """
        if not self.run.recipe.leaves_groups or self.number == 0:
            return []
        before = self.previous
        if not before.is_sealed():
            command = f"megarl rollout {quoted(self.run.root)} --stage {before.number}"
            raise UserError(
                f"{before.rollouts} is not sealed, so the groups that stage {self.number} continues are not known: "
                f"run `{command}`"
            )
        return sealed_groups(before.rollouts, "carried") or []

    def candidates(self) -> Sequence[int]:
        """The sorted ids of all groups that the stage may train.

        With ``rollout.token_budget`` (partial rollouts: BAPO, section 5.3) a response gets at most that many tokens in
        one stage. A group with a response that is not finished by then is stored in `unfinished`, without rewards; each
        token keeps the version of the policy that sampled it. Candidates are the groups that the stage begins and those
        that earlier stages began but did not train. The stage trains the first complete ones by id, and leaves the
        others to the next stage. So no group is lost, and which groups are trained depends neither on speed nor on
        kills.
        """
        continued = self.continued_groups()
        return [*continued, *self.groups] if continued else self.groups

    def groups_of_update(self, groups: Sequence[int], update: int) -> Sequence[int]:
        """The groups of one update of the stage, counted from 0; ``groups``: all that the stage trains.

        Every pass uses the same batches in the same order. Empty for an update beyond the stage.
        """
        schedule = self.run.recipe.schedule
        if update >= schedule.updates_per_stage:
            return []
        size, (batch, _) = schedule.prompts_per_update, schedule.batch_of(update)
        return groups[batch * size : (batch + 1) * size]

    @property
    def first_update(self) -> int:
        """The number of updates before this stage, which is the version of its policy."""
        return self.number * self.run.recipe.schedule.updates_per_stage

    def is_sealed(self) -> bool:
        return is_sealed(self.rollouts)

    def is_trained(self) -> bool:
        """Whether all updates of the stage were made and its result was exported: a later policy exists."""
        later = range(self.number + 1, self.run.recipe.schedule.stages + 1)
        return any(self.run.stage(number).policy.exists() for number in later)

    def policy_was_removed(self) -> bool:
        """Whether the stage had a policy that is gone, by `megarl.storage.run_dir.retention` or by hand."""
        return self.number > 0 and not self.policy.exists() and self.is_trained()

    def evaluation(self) -> dict[str, Any] | None:
        """The recorded evaluation of the stage's policy on the first suite, if there is one."""
        return self.run.evaluation(self.first_update)

    def due_evaluations(self) -> list[int]:
        """The versions to be evaluated when this stage begins: its policy and those exported before.

        A removed policy is not among them, even if its evaluation is lost: it was evaluated before it was removed.
        """
        run = self.run
        published = [version for version in run.versions() if version < self.first_update]
        own = [] if self.policy_was_removed() else [self.first_update]
        return [v for v in [*published, *own] if run.lacks_evaluation(v)]

    @property
    def oldest_needed(self) -> int:
        """The oldest version of the policy that engines of this stage or a later one may load."""
        schedule, first = self.run.recipe.schedule, self.first_update
        if first == schedule.total_updates or schedule.lag_rule.delay is None:
            return first
        return schedule.lag_rule.exact(first)

    def log_event(self, event: str, **fields: Any) -> None:
        self.run.log_event(event, stage=self.number, **fields)
