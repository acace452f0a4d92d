"""The tables and keys of a recipe, with their defaults, units and allowed values. Imports neither torch nor an engine.

`megarl.recipe.load` checks the fields of ``[objective]``, against the objective's own dataclass.
"""

from __future__ import annotations

import importlib.util
import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.recipe.base import Table
from megarl.recipe.data_table import DataTable as DataTable
from megarl.recipe.data_table import SourceTable
from megarl.recipe.eval_table import EvalTable as EvalTable
from megarl.recipe.eval_table import Suite as Suite
from megarl.recipe.eval_table import make_suites
from megarl.recipe.lora_table import LoraTable as LoraTable
from megarl.recipe.megatron import CONFIGS
from megarl.recipe.megatron import problems as megatron_problems
from megarl.recipe.optimizer_table import OptimizerTable as OptimizerTable
from megarl.recipe.recompute import Setting as RecomputeSetting
from megarl.recipe.reward_table import RewardPart as RewardPart
from megarl.recipe.reward_table import RewardTable as RewardTable
from megarl.recipe.rollout_table import RolloutTable as RolloutTable
from megarl.recipe.rollout_table import StageTable as StageTable
from megarl.recipe.schedule import LagRule, nearest_divisor


class ModelTable(Table):
    path: Path = Field(strict=False)  # Hugging Face directory: config.json + safetensors
    tokenizer: Path | None = Field(None, strict=False)  # default: the model directory

    @property
    def tokenizer_path(self) -> Path:
        return self.tokenizer or self.path


class ScheduleTable(Table):
    kind: Literal["staged", "live"] = "staged"
    stages: int = Field(4, ge=1, le=10**5)
    updates_per_stage: int = Field(1024, ge=1, le=10**7)  # S; of a staged run also the largest staleness
    prompts_per_update: int = Field(32, ge=1, le=10**6)
    passes: int = Field(1, ge=1, le=10**4)  # times that a staged run trains each group of a stage, in the same order
    # the rest is for live runs alone (docs/schedules.md)
    sync_every: int | None = Field(None, ge=1)  # updates between two versions of the policy that engines may load
    max_lag: int | None = Field(None, ge=0)  # updates; default with lockstep or delay: what follows from them
    lockstep: bool = False  # wait for the newest version before each batch: staleness 0 to sync_every - 1
    delay: int = Field(0, ge=0)  # versions; lockstep, but with an older version: staleness delay * sync_every and up
    partial: bool = False  # responses that a new version interrupts are continued under it
    colocate: bool = False  # engines and trainer take turns on the same GPUs

    @property
    def total_updates(self) -> int:
        return self.stages * self.updates_per_stage

    @property
    def updates_per_pass(self) -> int:
        return self.updates_per_stage // self.passes

    @property
    def lag_rule(self) -> LagRule:
        """For live runs only."""
        assert self.sync_every is not None
        delay = self.delay if self.lockstep or self.delay else None
        implied = (self.delay + 1) * self.sync_every - 1
        return LagRule(self.sync_every, implied if self.max_lag is None else self.max_lag, delay)

    @model_validator(mode="after")
    def _live_settings_agree(self) -> ScheduleTable:
        if self.kind == "staged":
            for name in ("sync_every", "max_lag", "lockstep", "delay", "partial", "colocate"):
                if getattr(self, name) != ScheduleTable.model_fields[name].default:
                    raise ValueError(f'{name} is a setting of kind = "live": leave it out, or set kind')
            if self.updates_per_stage % self.passes:
                nearest = nearest_divisor(self.updates_per_stage, self.passes)
                raise ValueError(
                    f"passes = {self.passes} does not divide updates_per_stage = {self.updates_per_stage}, which are "
                    f"the updates of all passes; the nearest that does is {nearest}"
                )
            return self
        if self.passes > 1:
            raise ValueError('passes is a setting of kind = "staged": a live run trains each group once')
        if self.sync_every is None:
            raise ValueError('kind = "live" needs sync_every: after how many updates engines get new weights')
        if self.updates_per_stage % self.sync_every:
            nearest = nearest_divisor(self.updates_per_stage, self.sync_every)
            raise ValueError(
                f"sync_every = {self.sync_every} does not divide updates_per_stage = {self.updates_per_stage}; "
                f"the nearest that does is {nearest}"
            )
        exact = self.lockstep or self.delay > 0
        if self.max_lag is None and not exact:
            raise ValueError('kind = "live" needs max_lag, how many updates old a sample may be, or lockstep = true')
        if self.partial and (exact or self.colocate):
            other = "colocate = true" if self.colocate else "lockstep and delay"
            why = "no new version comes while engines generate" if self.colocate else "want one version a batch"
            raise ValueError(f"partial = true continues responses under newer weights, but {other}: {why}")
        self.lag_rule  # noqa: B018 - raises where max_lag is too small
        return self


class ObjectiveTable(BaseModel):
    """``name`` and the objective's own fields, checked against its dataclass by `megarl.objectives`."""

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="constants")
    name: str = "mu_grpo"
    advantage: Literal["group_mean_std", "group_mean", "leave_one_out", "batch_normalised"] = "group_mean_std"
    zero_variance: Literal["keep", "drop"] = "keep"  # keep: groups without variance stay in the denominator

    @property
    def fields(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ActorTable(Table):
    backend: Literal["cpu", "cuda"] = "cuda"
    processes_per_node: int = Field(1, ge=1, le=1024)
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    context_parallel: int = Field(1, ge=1)
    expert_parallel: int = Field(1, ge=1)
    expert_tensor_parallel: int | None = Field(None, ge=1)  # default: tensor_parallel
    tokens_per_micro_batch: int = Field(
        16384, ge=1, le=10**9
    )  # tokens; a longer response gets a micro-batch of its own
    statistics_scope: Literal["exact", "lagged", "micro"] = "exact"
    kernels: Literal["torch", "cpp", "cuda", "triton"] | None = None  # default: cpp on a CPU, triton on a GPU
    recompute: RecomputeSetting = "none"
    # what the model's modules are made of; auto: Transformer Engine where it is installed, on GPUs
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    # who chooses a token's experts: the current policy; the policy at the start of the stage; the rollout engine
    routing_replay: Literal["none", "actor", "engine"] = "none"
    checkpoint_every: int = Field(64, ge=1)  # updates
    max_skipped_updates: int = Field(0, ge=0)  # of the whole run; more non-finite updates than this stop it
    keep_checkpoints: int = Field(2, ge=1)  # of a stage; older ones are removed
    keep_stages: int | None = Field(None, ge=1)  # finished stages whose checkpoints are kept; default: all
    keep_policies: int | None = Field(None, ge=1)  # those whose policy is kept, beside the first; default: all
    lora: LoraTable | None = None  # train low-rank adapters instead of the model's weights (docs/scale.md)

    @property
    def layer_kind(self) -> Literal["torch", "transformer_engine"]:
        """``layers``, with "auto" decided for this machine."""
        if self.layers != "auto":
            return self.layers
        installed = self.backend == "cuda" and importlib.util.find_spec("transformer_engine") is not None
        return "transformer_engine" if installed else "torch"

    @property
    def kernel_backend(self) -> str:
        return self.kernels or {"cpu": "cpp", "cuda": "triton"}[self.backend]

    @property
    def head_backend(self) -> str:
        """Of the fused lm head, which has no C++ or CUDA backend."""
        return "triton" if self.kernel_backend in ("triton", "cuda") else "torch"


class MetricsTable(Table):
    # updates from one with the diagnostics of docs/objectives.md that cost a pass over the tokens to the next; 0: none
    detail: int = Field(0, ge=0)
    listed_tokens: int = Field(50, ge=1, le=10**4)  # of those that lose their gradient most often


class RunTable(Table):
    seed: int = Field(0, ge=0, lt=2**32)
    max_restarts: int = Field(0, ge=0)  # times a failed phase is started again
    # how long a process may give no sign of progress: docs/running.md
    stall_seconds: float = Field(600.0, gt=0, le=10**7)
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    rehearse: bool = True  # on GPUs, before the first rollouts: an update on synthetic responses, export, checkpoint


class Recipe(Table):
    model: ModelTable
    data: DataTable
    reward: RewardTable
    rollout: RolloutTable = RolloutTable()
    stages: dict[str, StageTable] = Field({})  # by stage number, from 0
    schedule: ScheduleTable = ScheduleTable()
    objective: ObjectiveTable = ObjectiveTable()
    optimizer: OptimizerTable = OptimizerTable()
    actor: ActorTable = ActorTable()
    megatron: dict[str, Any] = Field({})  # passed through to megatron.core's TransformerConfig
    megatron_ddp: dict[str, Any] = Field({})  # and to its DistributedDataParallelConfig
    megatron_optimizer: dict[str, Any] = Field({})  # and to its OptimizerConfig; a torch.dtype by name, as "bfloat16"
    eval: EvalTable = EvalTable()
    metrics: MetricsTable = MetricsTable()
    run: RunTable = RunTable()

    def prompt_sources(self) -> list[SourceTable]:
        """Where the prompts of training and evaluation come from."""
        return [*self.data.mixture, *(table for suite in self.suites if suite.own for table in suite.data.mixture)]

    def prompt_files(self) -> list[str]:
        """The files of prompts, for training and for evaluation."""
        return [table.train for table in self.prompt_sources() if table.source == "file"]

    def template_files(self) -> list[str]:
        """The chat templates that are files, of training and of suites."""
        tables = [self.data, *(suite.data for suite in self.suites)]
        return sorted({table.template_file for table in tables if table.template_file})

    @property
    def suites(self) -> list[Suite]:
        """What is evaluated each time; none with evaluation turned off."""
        return make_suites(self.eval, self.data, self.rollout.max_response_tokens)

    def is_evaluated(self, version: int) -> bool:
        """Whether the policy after so many updates is to be evaluated."""
        every = [self.eval.every * self.schedule.updates_per_stage, self.eval.every_updates]
        at_end = version == self.schedule.total_updates
        return self.eval.on and (at_end or any(n and version % n == 0 for n in every))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its response, in rollouts and evaluations."""
        suites = ((suite.data.max_prompt_tokens, suite.max_response_tokens) for suite in self.suites)
        return max(map(sum, [(self.data.max_prompt_tokens, self.rollout.max_response_tokens), *suites]))

    def reward_files(self) -> list[str]:
        """The files of the user's own reward functions."""
        paths = [self.reward.path, *(part.path for part in self.reward.parts)]
        return [path.rpartition(":")[0] for path in paths if path]

    @model_validator(mode="after")
    def _buffers_fit(self) -> Recipe:
        for part in self.reward.parts:
            if part.buffer is not None and part.buffer > self.rollout.max_response_tokens:
                raise ValueError(
                    f"reward.parts: buffer = {part.buffer} is more than rollout.max_response_tokens = "
                    f"{self.rollout.max_response_tokens}"
                )
        return self

    @model_validator(mode="after")
    def _stages_exist(self) -> Recipe:
        for name in self.stages:
            if not name.isdecimal() or str(int(name)) != name or int(name) >= self.schedule.stages:
                raise ValueError(f"[stages.{name}]: this recipe has stages 0 to {self.schedule.stages - 1}")
        return self

    @model_validator(mode="after")
    def _suites_have_data(self) -> Recipe:
        self.suites  # noqa: B018 - raises where their settings do not fit
        return self

    @model_validator(mode="after")
    def _versions_to_evaluate_are_published(self) -> Recipe:
        every, sync = self.eval.every_updates, self.schedule.sync_every
        if every and sync and every % sync:
            raise ValueError(
                f"eval.every_updates = {every} is no multiple of schedule.sync_every = {sync}: a live run exports no "
                f"other policies; the nearest is {max(1, round(every / sync)) * sync}"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Recipe:
        if self.rollout.responses_per_prompt == 1 and self.objective.advantage != "batch_normalised":
            raise ValueError(
                f"objective.advantage = {self.objective.advantage!r} compares the responses of a prompt: "
                "rollout.responses_per_prompt must be at least 2"
            )
        if self.rollout.responses_per_prompt == 1 and self.objective.zero_variance == "drop":
            raise ValueError(
                'objective.zero_variance = "drop" would drop everything: a group of one response has no variance; '
                'use "keep", or rollout.responses_per_prompt of at least 2'
            )
        if self.rollout.responses_per_prompt * self.schedule.prompts_per_update == 1:
            raise ValueError(
                "an update of one response has nothing to compare: schedule.prompts_per_update must be at least 2"
            )
        return self

    @model_validator(mode="after")
    def _candidates_can_be_told_apart(self) -> Recipe:
        oversample = self.rollout.oversample
        if oversample > 1 and self.schedule.kind == "live":
            raise ValueError(
                f"rollout.oversample = {oversample} chooses groups when a stage is sealed, but a live run trains each "
                'as soon as it is there: leave it out, or set schedule.kind = "staged"'
            )
        if oversample > 1 and self.rollout.responses_per_prompt == 1 and not self.rollout.token_budget:
            raise ValueError(
                f"rollout.oversample = {oversample} looks for groups whose responses differ in reward: "
                "rollout.responses_per_prompt must be at least 2"
            )
        return self

    @model_validator(mode="after")
    def _something_can_wait(self) -> Recipe:
        budget, longest = self.rollout.token_budget, self.rollout.max_response_tokens
        if budget is None:
            return self
        here = f"rollout.token_budget = {budget}"
        if self.schedule.kind == "live":
            raise ValueError(
                f'{here} cuts responses at the end of a stage of kind = "staged"; in a live run schedule.partial = '
                "true continues them when new weights come"
            )
        if budget >= longest:
            raise ValueError(f"{here} cuts nothing: it must be below rollout.max_response_tokens = {longest}")
        if self.candidates_per_stage == self.groups_per_stage:
            raise ValueError(
                f"{here}, but with rollout.oversample = {self.rollout.oversample} each of the "
                f"{self.groups_per_stage} groups of a stage is needed at once, and no response could wait for the "
                "next: set rollout.oversample above 1, for example to 2"
            )
        return self

    @model_validator(mode="after")
    def _virtual_stages_are_several(self) -> Recipe:
        size = self.virtual_pipeline_stages
        if size is not None and (type(size) is not int or size < 2):
            raise ValueError(
                f"megatron.virtual_pipeline_model_parallel_size = {size!r}: model chunks of a pipeline rank, "
                "at least 2; leave it out for one"
            )
        return self

    @model_validator(mode="after")
    def _megatron_has_these_settings(self) -> Recipe:
        wrong = [p for table in CONFIGS for p in megatron_problems(table, getattr(self, table))]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def rollout_of(self, stage: int) -> RolloutTable:
        """``[rollout]`` with the changes of ``[stages.N]``; the final evaluation uses those of the last stage."""
        own = self.stages.get(str(min(stage, self.schedule.stages - 1)), StageTable())
        return self.rollout.model_copy(update=own.model_dump(exclude_none=True))

    @property
    def distinct_rollouts(self) -> dict[int, RolloutTable]:
        """`rollout_of` the stages that ``[stages.N]`` changes, and of the first that it does not."""
        numbers = {int(name) for name in self.stages}
        others = (stage for stage in range(self.schedule.stages) if stage not in numbers)
        return {stage: self.rollout_of(stage) for stage in sorted({*numbers, next(others, 0)})}

    @property
    def devices_per_node(self) -> int:
        """GPUs, or cores, that a node needs: trainers and engines take turns, or run side by side in a live run."""
        trainers = self.actor.processes_per_node
        engines = max(table.workers * table.tensor_parallel for table in self.distinct_rollouts.values())
        side_by_side = self.schedule.kind == "live" and not self.schedule.colocate
        return trainers + engines if side_by_side else max(trainers, engines)

    @property
    def virtual_pipeline_stages(self) -> int | None:
        """Model chunks of each pipeline rank; None: one, without the interleaved schedule."""
        return self.megatron.get("virtual_pipeline_model_parallel_size")

    @property
    def groups_per_stage(self) -> int:
        """Groups that a stage trains on."""
        return self.schedule.updates_per_pass * self.schedule.prompts_per_update

    @property
    def candidates_per_stage(self) -> int:
        """Groups that a stage generates at most, from which `groups_per_stage` are chosen."""
        # the decimal number in the recipe, not its float: 10 groups at 1.1 are 11 candidates, not 12
        return math.ceil(self.groups_per_stage * Fraction(str(self.rollout.oversample)))

    def groups_begun(self, stage: int) -> range:
        """The groups that a stage begins. A group's id is the place of its prompt in the whole run's order.

        With ``rollout.token_budget`` those that the stage before has not trained are candidates again, and as many as
        it has trained are begun in their place.
        """
        size = self.candidates_per_stage
        if self.rollout.token_budget is None or stage == 0:
            return range(stage * size, (stage + 1) * size)
        end = size + stage * self.groups_per_stage
        return range(end - self.groups_per_stage, end)

    def stage_that_begins(self, group: int) -> int:
        """The inverse of `groups_begun`."""
        size = self.candidates_per_stage
        if self.rollout.token_budget is None or group < size:
            return group // size
        return 1 + (group - size) // self.groups_per_stage

    @property
    def prompts_needed(self) -> int:
        """Prompts of the whole run."""
        return self.groups_begun(self.schedule.stages - 1).stop

    @property
    def mixes_policies(self) -> bool:
        """Whether the tokens that a stage trains come from several policies."""
        return self.schedule.kind == "live" or self.rollout.token_budget is not None
