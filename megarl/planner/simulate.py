"""``megarl simulate``: hours to N updates of a staged, a lock-step and a live run on the same GPUs, over seeds.

Times of decoding steps and updates come from a `megarl.planner.plan.Plan`. Lengths of responses are random
(`megarl.planner.cluster`); failures take what they take on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megarl.errors import UserError
from megarl.planner.assumptions import WITHIN, Assumptions
from megarl.planner.cluster import Lengths, decode_seconds, ends_of_batches
from megarl.planner.fit import make_plan
from megarl.planner.plan import Plan
from megarl.recipe.load import load_recipe
from megarl.recipe.tables import Recipe, ScheduleTable

HOUR, DAY = 3600.0, 86400.0
# bytes of weights a second in a system that hands them from trainers' GPUs to engines' without storage: Kimi's
# checkpoint-engine, 1 TB in about 20 s; verl needs 0.12 s for 7 B parameters
DIRECT = 50e9


@dataclass(frozen=True)
class Scenario:
    """The schedules that are compared, and the conditions in the cluster; most fields are options of the command."""

    updates: int
    stage: int  # S: updates of a stage of the staged run
    sync_every: int  # updates between two versions of the lock-step and the live run
    lag: int  # largest, of the live run
    spread: float = 0.6  # standard deviation of the logarithm of a response's length; 0: all are equally long
    failures: float = 0.004  # per node and day; as in Llama 3's training, see docs/scale.md
    restart: float = 600.0  # seconds until a failed job runs again, without loading of engines
    handover: float | None = None  # seconds to give engines new weights; None: through shared storage, as megarl does
    passes: float = 0.0  # additional forward passes per update of the lock-step run
    seeds: int = 20

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
        for name in ("spread", "failures", "restart", "handover", "passes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"--{name} {value:g}: at least 0")
        if self.spread > 3:
            raise UserError(f"--spread {self.spread:g}: up to 3")


@dataclass(frozen=True)
class Run:
    """Seconds of one simulated run, by what they are spent on."""

    generating: float
    training: float
    storage: float  # starts and loads of engines, exports, checkpoints
    lost: float  # to failures, on average
    total: float
    idle: float = 0.0  # share of the trainers' time in which they wait; live run only


@dataclass(frozen=True)
class Simulation:
    """Simulates runs, from the plan of a staged run on all GPUs."""

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
    def lengths(self) -> Lengths:
        longest = self.plan.recipe.rollout.max_response_tokens
        return Lengths.of_mean(self.plan.mean_response, longest, self.scenario.spread)

    @cached_property
    def step(self) -> np.ndarray:
        """Seconds of a decoding step, by the number of responses that a replica decodes together."""
        return self._steps(self.plan)

    @cached_property
    def beside_trainers(self) -> np.ndarray | None:
        """As `step`, for engines in the memory that trainers leave; None if no engine fits beside them."""
        table, memory = self.plan.recipe.rollout, self.plan.device.memory
        share = min(self.plan.engine_share, self.plan.left_to_engines) / memory
        if share <= 0:
            return None
        # an engine whose memory_fraction is the share of the whole of it
        small = table.model_copy(update={"memory_fraction": share, "engine": "builtin"})
        beside = replace(self.plan, recipe=self.plan.recipe.model_copy(update={"rollout": small}))
        return None if beside.rollout_misfit() is not None else self._steps(beside)

    @staticmethod
    def _steps(plan: Plan) -> np.ndarray:
        slots = max(1, min(int(plan.responses_that_fit(plan.cached_tokens)), plan.engine_responses))
        return np.array([plan.decode_step_seconds(running) for running in range(slots + 1)])

    @property
    def export(self) -> float:
        """Seconds to write weights to shared storage, or for one engine to read them."""
        return 2.0 * self.plan.parameters / self.plan.assume.storage

    @property
    def direct(self) -> float:
        """Seconds in which a system that hands weights from GPU to GPU would give them to all engines."""
        return 2.0 * self.plan.parameters / DIRECT

    @property
    def checkpoint(self) -> float:
        return self.plan.disk["one checkpoint"] / self.plan.assume.storage

    def batch(self, rng: np.random.Generator, updates: int) -> np.ndarray:
        """[replicas, responses] random lengths of the responses of ``updates`` updates, shared evenly (rounded up)."""
        each = math.ceil(updates * self.plan.responses_per_update / self.plan.replicas)
        return self.lengths.draw(rng, (self.plan.replicas, each))

    def staged(self, rng: np.random.Generator) -> Run:
        """Stages of ``scenario.stage`` updates: engines start, generate and end; then trainers train."""
        update = self.plan.update_seconds()
        return self._in_turns(rng, self.scenario.stage, self.step, self.plan.assume.engine_start, None, update)

    def lockstep(self, rng: np.random.Generator) -> Run:
        """Turns of ``scenario.sync_every`` updates. Engines stay in memory beside the trainers.

        If trainers leave too little memory for that, engines start anew in each turn.
        """
        beside, scenario = self.beside_trainers, self.scenario
        step, start = (self.step, self.plan.assume.engine_start) if beside is None else (beside, 0.0)
        update = self.plan.update_seconds(scenario.passes)
        return self._in_turns(rng, scenario.sync_every, step, start, scenario.handover, update)

    def _in_turns(
        self,
        rng: np.random.Generator,
        size: int,
        step: np.ndarray,
        start: float,
        handover: float | None,
        update: float,
    ) -> Run:
        """Turns of ``size`` updates of ``update`` seconds, each after generation.

        Turns of fewer than `checkpoint_every` updates share a checkpoint.

        Args:
            step: seconds of a decoding step, as in `step`.
            start: seconds in which engines start, in each turn.
            handover: seconds to give engines new weights; None: through shared storage.
        """
        scenario, every = self.scenario, self.plan.recipe.actor.checkpoint_every
        exchange = self.export + self.export * self.plan.replicas if handover is None else handover
        turns = scenario.updates // size
        generating = sum(float(decode_seconds(self.batch(rng, size), step).max()) for _ in range(turns))
        saves = turns * math.ceil(size / every) if size >= every else math.ceil(scenario.updates / every)
        storage, training = turns * (start + exchange) + saves * self.checkpoint, scenario.updates * update
        return self._run(generating + training + storage, saves, generating, training, storage)

    def live(self, rng: np.random.Generator, engines: int) -> Run:
        """Engines on ``engines`` GPUs of each node generate while the other GPUs train.

        A batch begins as soon as engines have room and a policy exists that is not older than the lag allows; it ends
        with its longest response. Generated batches survive a failure; updates since the last checkpoint do not.
        """
        plan, scenario, k = self.plan, self.scenario, self.scenario.sync_every
        devices = plan.recipe.actor.processes_per_node
        replicas = max(1, plan.nodes * engines // plan.recipe.rollout.tensor_parallel)
        update = plan.update_seconds() * devices / (devices - engines)
        each = plan.responses_per_update
        sync = self.export * replicas if scenario.handover is None else scenario.handover
        export = self.export if scenario.handover is None else 0.0
        ended = np.zeros(scenario.updates + 1)  # [n]: the second at which n updates are done, and published
        begun, idle = plan.assume.engine_start, 0.0
        for first in range(0, scenario.updates, k):
            lengths = self.lengths.draw(rng, (k, each))
            allowed = [float(ended[max(0, -(-(first + i - scenario.lag) // k) * k)]) for i in range(k)]
            begun, there = self._generated(lengths, max(begun, allowed[0]) + sync, allowed, replicas)
            for batch, at in enumerate(there, first):
                idle += max(0.0, at - ended[batch])
                work = update + (export if (batch + 1) % k == 0 else 0.0)
                if (batch + 1) % plan.recipe.actor.checkpoint_every == 0 or batch + 1 == scenario.updates:
                    work += self.checkpoint
                ended[batch + 1] = max(ended[batch], at) + work
        saves = math.ceil(scenario.updates / plan.recipe.actor.checkpoint_every)
        storage, training = saves * self.checkpoint + scenario.updates // k * export, scenario.updates * update
        run = self._run(float(ended[-1]), saves, float(begun), training, storage)
        return replace(run, idle=idle / float(ended[-1]))

    def _generated(
        self, lengths: np.ndarray, begun: float, allowed: list[float], replicas: int
    ) -> tuple[float, list[float]]:
        """(second at which the next batches can begin, second at which each of these batches ends).

        Args:
            lengths: [batches, responses] tokens.
            begun: second at which the engines are free.
            allowed: second at which a policy exists that may generate the batch, for each batch.
        """
        slots, together = len(self.step) - 1, math.ceil(lengths.size / replicas)
        if self.scenario.lag < 2 * self.scenario.sync_every - 1:
            # no batch of the next policy may begin before these have ended, so engines run empty
            if together <= slots:
                there = begun + ends_of_batches(lengths, self.step, replicas)
            else:
                last = decode_seconds(np.resize(lengths, (replicas, together)), self.step).max()
                there = begun + last * np.arange(1, len(lengths) + 1) / len(lengths)
            return float(there.max()), there.tolist()
        running = max(1, min(slots, math.ceil((self.scenario.lag + 1) * lengths.shape[1] / replicas)))
        token, ends = float(self.step[running]), []
        for batch, policy in zip(lengths, allowed, strict=True):
            begun = max(begun, policy)
            seconds = float(batch.sum()) * token / replicas / running
            ends.append(begun + max(seconds, float(batch.max()) * token))
            begun += seconds
        return begun, ends

    def _run(self, work: float, saves: int, generating: float, training: float, storage: float) -> Run:
        """A run of ``work`` seconds in which ``saves`` checkpoints are written, with failures.

        They take what they take on average. Each loses the work since the last checkpoint.
        """
        scenario, segment = self.scenario, work / saves
        rate = scenario.failures * self.plan.nodes / DAY
        if rate * segment > 10:
            raise UserError(
                f"--failures {scenario.failures:g}: the {segment / HOUR:.1f} hours of work between two "
                "checkpoints hardly ever end without a failure; lower actor.checkpoint_every"
            )
        # s seconds between two checkpoints take (exp(rate s) - 1) (1 / rate + restart) in the mean
        lost = saves * math.expm1(rate * segment) * (1 / rate + scenario.restart) - work if rate else 0.0
        return Run(generating, training, storage, lost, work + lost)

    @cached_property
    def engines(self) -> int:
        """GPUs of a node for the engines of the live run: the number with which the run is fastest."""
        devices, tensor = self.plan.recipe.actor.processes_per_node, self.plan.recipe.rollout.tensor_parallel
        choices = range(tensor, devices, tensor)
        if not choices:
            raise UserError(f"a live run needs more than {devices} GPUs a node with rollout.tensor_parallel = {tensor}")
        calm = replace(self, scenario=replace(self.scenario, spread=0.0, failures=0.0))
        few = replace(calm, scenario=replace(calm.scenario, updates=self.scenario.stage))
        return min(choices, key=lambda engines: few.live(np.random.default_rng(0), engines).total)

    def runs(self) -> dict[str, list[Run]]:
        """{description of a schedule: its runs, one per seed}."""
        scenario, devices = self.scenario, self.plan.recipe.actor.processes_per_node
        direct = replace(self, scenario=replace(scenario, handover=self.direct))
        schedules: dict[str, Callable[[np.random.Generator], Run]] = {
            f"staged, S = {scenario.stage}": self.staged,
            f"lock-step, new weights every {scenario.sync_every}": self.lockstep,
            f"live, lag up to {scenario.lag}, engines on {self.engines} of {devices}": lambda r: self.live(
                r, self.engines
            ),
        }
        if scenario.handover is None:  # as megarl does; other systems do it otherwise
            schedules |= {
                f"lock-step, every {scenario.sync_every}, GPU to GPU": direct.lockstep,
                f"live, lag up to {scenario.lag}, GPU to GPU": lambda r: direct.live(r, direct.engines),
            }
        return {
            name: [simulate(np.random.default_rng(seed)) for seed in range(scenario.seeds)]
            for name, simulate in schedules.items()
        }

    def table(self) -> Iterator[str]:
        scenario, plan = self.scenario, self.plan
        recipe, gpus = plan.recipe, f"{plan.nodes} x {plan.recipe.actor.processes_per_node} {plan.gpu}"
        batch = f"{recipe.schedule.prompts_per_update} prompts x {recipe.rollout.responses_per_prompt} responses"
        yield f"{scenario.updates} updates of {batch} on {gpus}: hours, mean of {scenario.seeds} seeds"
        yield f"calibrated with published figures, within a factor of {WITHIN} each (docs/scale.md)"
        if scenario.handover is None:
            yield (
                f"engines get new weights through storage: {self.export:.1f} s to write, "
                f"{self.export * plan.replicas:.1f} s for {plan.replicas} replicas to read; GPU to GPU (not in "
                f"megarl): {self.direct:.1f} s"
            )
        else:
            yield f"engines of lock-step and live get new weights in {scenario.handover:g} s (--handover)"
        names = ("total", "generating", "training", "storage", "lost")
        yield f"  {'':<44}{'total':>8}{'generate':>10}{'train':>8}{'storage':>9}{'lost':>7}  trainers wait"
        for schedule, runs in self.runs().items():
            hours = [np.mean([getattr(run, name) for run in runs]) / HOUR for name in names]
            columns = "".join(f"{size:{width}.2f}" for size, width in zip(hours, (8, 10, 8, 9, 7), strict=True))
            idle = np.mean([run.idle for run in runs])
            yield f"  {schedule:<44}{columns}" + (f"{idle:15.1%}" if idle else "")


def make_simulation(
    recipe_path: Path,
    nodes: int,
    gpu: str,
    overrides: Sequence[str],
    assume: Assumptions,
    hbm: float | None,
    given: dict[str, float | None],
) -> Simulation:
    """`UserError` if the recipe, as a staged run, does not fit these GPUs, or for options out of range.

    given: options of the command by the names of the fields of `Scenario`; None: not given.
    """
    scenario = Scenario.of(load_recipe(recipe_path, overrides).schedule, given)
    fit = make_plan(recipe_path, nodes, gpu, overrides, assume, hbm, lambda r: Simulation.recipe(r, scenario.stage))
    if fit.misfit is not None:
        raise UserError(fit.text())
    return Simulation(fit.plan, scenario)
