"""``megarl simulate``: hours to N updates of a staged, a lock-step and a live run on the same GPUs.

Times of decoding steps and updates come from a `megarl.planner.plan.Plan`. Responses have all lengths from 0 to the
longest, with the plan's mean; nothing is random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megarl.errors import UserError
from megarl.planner.assumptions import WITHIN, Assumptions
from megarl.planner.fit import make_plan
from megarl.planner.plan import Plan
from megarl.recipe.load import load_recipe
from megarl.recipe.tables import Recipe, ScheduleTable

HOUR = 3600.0


@dataclass(frozen=True)
class Scenario:
    """The schedules that are compared; the fields are options of the command."""

    updates: int
    stage: int  # S: updates of a stage of the staged run
    sync_every: int  # updates between two versions of the lock-step and the live run
    lag: int  # largest, of the live run
    handover: float | None = None  # seconds to give engines new weights; None: through shared storage, as megarl does

    @classmethod
    def of(cls, schedule: ScheduleTable, given: dict[str, float | None]) -> Scenario:
        """A recipe's schedule, with the options that are given; `UserError` for wrong ones."""
        stage, lag = schedule.updates_per_stage, schedule.lag_rule.max_lag
        k = schedule.sync_every or math.gcd(4, stage)
        defaults = {"updates": schedule.total_updates, "stage": stage, "sync_every": k, "lag": lag}
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(**defaults | chosen)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """`UserError` for values that no run can have."""
        if self.updates % self.stage or self.stage % self.sync_every:
            raise UserError(
                f"--updates {self.updates}, --stage {self.stage} and --sync-every {self.sync_every}: "
                "each must be a multiple of the next"
            )
        if self.lag < self.sync_every - 1:
            raise UserError(
                f"--lag {self.lag}: with new weights every {self.sync_every} updates it must be at least "
                f"{self.sync_every - 1}"
            )


@dataclass(frozen=True)
class Run:
    """Seconds of one run, by what they are spent on."""

    generating: float
    training: float
    storage: float  # starts and loads of engines, exports, checkpoints
    total: float

    @property
    def idle(self) -> float:
        """Share of the time in which trainers of a live run wait."""
        return 1 - (self.training + self.storage) / self.total


@dataclass(frozen=True)
class Simulation:
    """The times of runs, from the plan of a staged run on all GPUs."""

    plan: Plan
    scenario: Scenario

    @classmethod
    def recipe(cls, recipe: Recipe, stage: int) -> Recipe:
        """``recipe`` as a staged run with ``stage`` updates per stage, whose engines use all its GPUs."""
        devices, tensor = recipe.devices_per_node, recipe.rollout.tensor_parallel
        schedule = ScheduleTable(updates_per_stage=stage, prompts_per_update=recipe.schedule.prompts_per_update)
        rollout = {"workers": devices // tensor, "memory_fraction": None, "oversample": 1.0, "token_budget": None}
        if recipe.schedule.one_policy:
            rollout.pop("memory_fraction")
        else:  # the recipe's number is for engines beside trainers
            rollout["groups_per_chunk"] = type(recipe.rollout).model_fields["groups_per_chunk"].default
        return recipe.model_copy(
            update={
                "schedule": schedule,
                "rollout": recipe.rollout.model_copy(update=rollout),
                "actor": recipe.actor.model_copy(update={"processes_per_node": devices}),
            }
        )

    @cached_property
    def beside_trainers(self) -> Simulation:
        """The same with engines in the memory that trainers leave; with those of the plan if none fits there."""
        plan, table = self.plan, self.plan.recipe.rollout
        # an engine whose memory_fraction is the share of the whole of it
        share = min(plan.engine_share, plan.left_to_engines) / plan.device.memory
        small = table.model_copy(update={"memory_fraction": share, "engine": "builtin"})
        beside = replace(plan, recipe=plan.recipe.model_copy(update={"rollout": small}))
        return self if beside.rollout_misfit() is not None else replace(self, plan=beside)

    @cached_property
    def step(self) -> np.ndarray:
        """Seconds of a decoding step, by the number of responses that a replica decodes together."""
        plan = self.plan
        slots = max(1, min(int(plan.responses_that_fit(plan.cached_tokens)), plan.engine_responses))
        return np.array([plan.decode_step_seconds(running) for running in range(slots + 1)])

    def decode_seconds(self, updates: int, replicas: int) -> float:
        """Seconds in which ``replicas`` engines generate the responses of ``updates`` updates, to the last token.

        While more responses wait than there are slots, all slots are taken; then steps have fewer and fewer responses.
        """
        responses = updates * self.plan.responses_per_update / replicas
        running = min(math.ceil(responses), len(self.step) - 1)
        full = max(0.0, responses - running) * self.plan.mean_response / running * self.step[running]
        # the lengths of `running` responses: L u^(L / mean - 1) has the mean of the plan for u in [0, 1]
        longest = self.plan.recipe.rollout.max_response_tokens
        ends = longest * ((np.arange(running) + 0.5) / running) ** (longest / self.plan.mean_response - 1)
        return float(full + (np.diff(ends, prepend=0.0) * self.step[running:0:-1]).sum())

    @property
    def export(self) -> float:
        """Seconds to write weights to shared storage, or for one engine to read them."""
        return self.plan.disk["one policy"] / self.plan.assume.storage

    @property
    def checkpoint(self) -> float:
        return self.plan.disk["one checkpoint"] / self.plan.assume.storage

    def staged(self) -> Run:
        """Stages of ``scenario.stage`` updates: engines start, generate and end; then trainers train."""
        size, every = self.scenario.stage, self.plan.recipe.actor.checkpoint_every
        stages = self.scenario.updates // size
        exchange = self.export * (1 + self.plan.replicas)
        storage = stages * (self.plan.assume.engine_start + exchange + math.ceil(size / every) * self.checkpoint)
        return self._in_turns(size, self.decode_seconds(size, self.plan.replicas), storage)

    def lockstep(self) -> Run:
        """Turns of ``scenario.sync_every`` updates. Engines stay in memory beside the trainers."""
        scenario, every = self.scenario, self.plan.recipe.actor.checkpoint_every
        exchange = self.export * (1 + self.plan.replicas) if scenario.handover is None else scenario.handover
        storage = scenario.updates // scenario.sync_every * exchange
        storage += math.ceil(scenario.updates / every) * self.checkpoint
        generating = self.beside_trainers.decode_seconds(scenario.sync_every, self.plan.replicas)
        return self._in_turns(scenario.sync_every, generating, storage)

    def _in_turns(self, size: int, generating: float, storage: float) -> Run:
        """Turns of ``size`` updates, each after its generation of ``generating`` seconds."""
        generating *= self.scenario.updates // size
        training = self.scenario.updates * self.plan.update_seconds()
        return Run(generating, training, storage, generating + training + storage)

    def live(self, engines: int) -> Run:
        """Engines on ``engines`` GPUs of each node generate while the other GPUs train.

        If the lag allows that a version is generated while the one before is trained, the slower role sets the pace.
        Otherwise engines begin when a version has been trained, and trainers when its responses have ended.
        """
        plan, scenario, k = self.plan, self.scenario, self.scenario.sync_every
        devices, versions = plan.recipe.actor.processes_per_node, scenario.updates // k
        replicas = max(1, plan.nodes * engines // plan.recipe.rollout.tensor_parallel)
        load, export = (self.export * replicas, self.export) if scenario.handover is None else (scenario.handover, 0.0)
        training = scenario.updates * plan.update_seconds() * devices / (devices - engines)
        saves = math.ceil(scenario.updates / plan.recipe.actor.checkpoint_every)
        writing = versions * export + saves * self.checkpoint
        first = load + self.decode_seconds(k, replicas)
        if scenario.lag < 2 * k - 1:
            generating = versions * first
            total = generating + training + writing
        else:
            waiting = (scenario.lag + 1) * plan.responses_per_update / replicas
            running = max(1, min(len(self.step) - 1, math.ceil(waiting)))
            responses = scenario.updates * plan.responses_per_update / replicas
            generating = versions * load + responses * plan.mean_response / running * float(self.step[running])
            total = first + max(generating, training + writing)
        start = plan.assume.engine_start
        return Run(generating, training, start + writing, start + total)

    @cached_property
    def engines(self) -> int:
        """GPUs of a node for the engines of the live run: the number with which the run is fastest."""
        devices, tensor = self.plan.recipe.actor.processes_per_node, self.plan.recipe.rollout.tensor_parallel
        choices = range(tensor, devices, tensor)
        if not choices:
            raise UserError(f"a live run needs more than {devices} GPUs a node with rollout.tensor_parallel = {tensor}")
        return min(choices, key=lambda engines: self.live(engines).total)

    def table(self) -> Iterator[str]:
        scenario, plan = self.scenario, self.plan
        recipe, devices = plan.recipe, plan.recipe.actor.processes_per_node
        batch = f"{recipe.schedule.prompts_per_update} prompts x {recipe.rollout.responses_per_prompt} responses"
        yield f"{scenario.updates} updates of {batch} on {plan.nodes} x {devices} {plan.gpu}: hours"
        yield f"calibrated with published figures, within a factor of {WITHIN} each (docs/scale.md)"
        yield f"  {'':<42}{'total':>18}{'generate':>10}{'train':>8}{'storage':>9}  trainers wait"
        runs = {
            f"staged, S = {scenario.stage}": self.staged(),
            f"lock-step, new weights every {scenario.sync_every}": self.lockstep(),
            f"live, lag up to {scenario.lag}, engines on {self.engines} of {devices}": self.live(self.engines),
        }
        for schedule, run in runs.items():
            low, high = run.total / HOUR / WITHIN, run.total / HOUR * WITHIN
            parts = zip((run.generating, run.training, run.storage), (10, 8, 9), strict=True)
            columns = f"{low:8.2f} .. {high:<6.2f}" + "".join(f"{size / HOUR:{width}.2f}" for size, width in parts)
            yield f"  {schedule:<42}{columns}" + (f"{run.idle:15.1%}" if schedule.startswith("live") else "")


def make_simulation(
    recipe_path: Path,
    nodes: int,
    gpu: str,
    overrides: Sequence[str],
    assume: Assumptions,
    given: dict[str, float | None],
) -> Simulation:
    """`UserError` if the recipe, as a staged run, does not fit these GPUs, or for options out of range.

    given: options of the command by the names of the fields of `Scenario`; None: not given.
    """
    scenario = Scenario.of(load_recipe(recipe_path, overrides).schedule, given)
    fit = make_plan(recipe_path, nodes, gpu, overrides, assume, lambda r: Simulation.recipe(r, scenario.stage))
    if fit.misfit is not None:
        raise UserError(fit.text())
    return Simulation(fit.plan, scenario)
