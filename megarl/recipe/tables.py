"""The tables and keys of a recipe, with their defaults, units and allowed values. Imports neither torch nor an engine.

Longer tables have modules of their own here. `megarl.recipe.load` checks ``[objective]`` against the objective.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megarl.errors import did_you_mean
from megarl.own_file import file_of, is_own
from megarl.recipe.actor_table import ActorTable, OptimizerTable
from megarl.recipe.base import Table
from megarl.recipe.data_table import DataTable, SourceTable
from megarl.recipe.eval_table import EvalTable, Suite, make_suites
from megarl.recipe.megatron import CONFIGS
from megarl.recipe.megatron import problems as megatron_problems
from megarl.recipe.names import ADVANTAGES, GROUP_ADVANTAGES
from megarl.recipe.reward_table import RewardTable
from megarl.recipe.rollout_table import RolloutTable, StageTable
from megarl.recipe.schedule import ScheduleTable


class ModelTable(Table):
    path: Path = Field(strict=False)  # Hugging Face directory: config.json + safetensors
    tokenizer: Path | None = Field(None, strict=False)  # default: the model directory

    @property
    def tokenizer_path(self) -> Path:
        return self.tokenizer or self.path


class ObjectiveTable(BaseModel):
    """``[objective]``: shared keys, and the objective's own, which `megarl.objectives` checks against its dataclass."""

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="constants")
    name: str = "mu_grpo"  # with path: the name of the class
    path: str | None = None  # an objective of the user's own: FILE.py:CLASS
    advantage: str = "group_mean_std"  # one of ADVANTAGES, or FILE.py:FUNCTION
    zero_variance: Literal["keep", "drop"] = "keep"  # keep: groups without reward variance count in the denominator

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_class(cls, table: Any) -> Any:
        if not isinstance(table, dict) or not isinstance(path := table.get("path"), str):
            return table
        if not is_own(path):
            raise ValueError(f"path = {path!r}: expected FILE.py:CLASS")
        own = path.rpartition(":")[2]
        if table.get("name", own) != own:
            raise ValueError(f"path = {path!r} names an objective, and name = {table['name']!r} another: leave one out")
        return table | {"name": own}

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, advantage: str) -> str:
        if advantage not in ADVANTAGES and not is_own(advantage):
            raise ValueError(f"unknown; {did_you_mean(advantage, [*ADVANTAGES, 'FILE.py:FUNCTION'])}")
        return advantage

    @property
    def definition(self) -> str:
        """Where the objective stands: its name, or FILE.py:CLASS."""
        return self.path or self.name

    @property
    def fields(self) -> dict[str, Any]:
        """The objective's own fields."""
        return dict(self.model_extra or {})


class MetricsTable(Table):
    # every how many updates the costly diagnostics of docs/objectives.md (another pass over the tokens) run; 0: never
    detail: int = Field(0, ge=0)
    # columns of the prompts' rows, or "source", for each value of which there are metrics of its own
    by: tuple[str, ...] = Field((), strict=False)


class RunTable(Table):
    seed: int = Field(0, ge=0, lt=2**32)  # of prompts, sampling and batches
    max_restarts: int = Field(0, ge=0)  # times a failed phase is started again
    # how long a process may make no progress before its phase is restarted: docs/running.md
    stall_seconds: float = Field(1800.0, gt=0, le=10**7)
    tensorboard: bool = True  # write the metrics as TensorBoard events
    wandb: bool = False  # and send them to Weights & Biases
    mlflow: bool = False  # and to MLflow
    rehearse: bool = True  # on GPUs: try an update, an export and a checkpoint before the first rollouts


class Recipe(Table):
    model: ModelTable
    data: DataTable
    reward: RewardTable
    rollout: RolloutTable = RolloutTable()
    stages: dict[str, StageTable] = Field({})  # stage number, from 0 -> settings that differ from [rollout]
    schedule: ScheduleTable = ScheduleTable()
    objective: ObjectiveTable = ObjectiveTable()
    optimizer: OptimizerTable = OptimizerTable()
    actor: ActorTable = ActorTable()
    megatron: dict[str, Any] = Field({})  # passed through to megatron.core's TransformerConfig
    megatron_ddp: dict[str, Any] = Field({})  # passed through to its DistributedDataParallelConfig
    megatron_optimizer: dict[str, Any] = Field({})  # passed through to its OptimizerConfig
    eval: EvalTable = EvalTable()
    metrics: MetricsTable = MetricsTable()
    run: RunTable = RunTable()

    def prompt_sources(self) -> list[SourceTable]:
        """The sources of all prompts, for training and for evaluation."""
        return [*self.data.mixture, *(table for suite in self.suites if suite.own for table in suite.data.mixture)]

    def prompt_files(self) -> list[str]:
        """The prompt files among them."""
        return [table.train for table in self.prompt_sources() if table.source == "file"]

    def template_files(self) -> list[str]:
        """The files of chat templates, for training and for evaluation."""
        tables = [self.data, *(suite.data for suite in self.suites)]
        return sorted({table.template_file for table in tables if table.template_file})

    @property
    def suites(self) -> list[Suite]:
        """The suites of every evaluation; none if evaluation is off."""
        return make_suites(self.eval, self.data, self.rollout.max_response_tokens)

    def is_evaluated(self, version: int) -> bool:
        """Whether the policy after ``version`` updates is to be evaluated."""
        every = [self.eval.every * self.schedule.updates_per_stage, self.eval.every_updates]
        at_end = version == self.schedule.total_updates
        return self.eval.on and (at_end or any(n and version % n == 0 for n in every))

    @property
    def longest(self) -> int:
        """The largest number of tokens of a prompt with its response, in rollouts and evaluations."""
        suites = ((suite.data.max_prompt_tokens, suite.max_response_tokens) for suite in self.suites)
        return max(map(sum, [(self.data.max_prompt_tokens, self.rollout.max_response_tokens), *suites]))

    def own_files(self) -> dict[str, str]:
        """The user's own Python files, and a judge's question: file -> the setting that names it; "reward.path" for one
        of both tables."""
        objective, rewards = self.objective, (self.reward.path, *(part.path for part in self.reward.parts))
        paths = {objective.advantage: "objective.advantage", objective.path: "objective.path"}
        paths |= dict.fromkeys(rewards, "reward.path")
        files = {file_of(path): setting for path, setting in paths.items() if path and is_own(path)}
        service = self.reward.service
        return files | ({str(service.prompt): "reward.service.prompt"} if service and service.prompt else {})

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
        self.suites  # noqa: B018 - raises if their settings do not fit
        return self

    @model_validator(mode="after")
    def _versions_to_evaluate_are_published(self) -> Recipe:
        every, sync = self.eval.every_updates, self.schedule.sync_every
        if every and sync and every % sync:
            raise ValueError(
                f"eval.every_updates = {every} is not a multiple of schedule.sync_every = {sync}: a live run exports "
                f"only such policies; the nearest multiple is {max(1, round(every / sync)) * sync}"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Recipe:
        if self.rollout.responses_per_prompt == 1 and self.objective.advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"objective.advantage = {self.objective.advantage!r} compares the responses to a prompt: "
                "rollout.responses_per_prompt must be at least 2"
            )
        if self.rollout.responses_per_prompt == 1 and self.objective.zero_variance == "drop":
            raise ValueError(
                'objective.zero_variance = "drop" would drop everything: a group of one response has no variance; '
                'use "keep", or rollout.responses_per_prompt of at least 2'
            )
        if self.rollout.responses_per_prompt * self.schedule.prompts_per_update == 1:
            raise ValueError(
                "an update of one response has nothing to compare it with: schedule.prompts_per_update must be at "
                "least 2"
            )
        return self

    @model_validator(mode="after")
    def _candidates_can_be_told_apart(self) -> Recipe:
        oversample = self.rollout.oversample
        if oversample > 1 and self.schedule.partial:
            raise ValueError(
                f"rollout.oversample = {oversample} chooses before all candidates are finished, and schedule.partial = "
                "true would continue the others under every later policy: leave one of them out"
            )
        if oversample > 1 and self.groups_per_stage % self.groups_per_choice:
            raise ValueError(
                f"rollout.oversample = {oversample} chooses for {self.schedule.sync_every} updates at a time: "
                "schedule.sync_every must divide schedule.updates_per_stage"
            )
        if oversample > 1 and self.rollout.responses_per_prompt == 1 and not self.rollout.token_budget:
            raise ValueError(
                f"rollout.oversample = {oversample} looks for groups whose responses differ in reward: "
                "rollout.responses_per_prompt must be at least 2"
            )
        return self

    @model_validator(mode="after")
    def _responses_can_be_carried_on(self) -> Recipe:
        budget, longest = self.rollout.token_budget, self.rollout.max_response_tokens
        if budget is None:
            return self
        here = f"rollout.token_budget = {budget}"
        if not self.schedule.one_policy:
            raise ValueError(
                f'{here} is only for schedule.kind = "staged", where it interrupts responses until the next stage; in '
                "a live run schedule.partial = true continues responses when new weights arrive"
            )
        if budget >= longest:
            raise ValueError(f"{here} has no effect: it must be below rollout.max_response_tokens = {longest}")
        if self.candidates_per_stage == self.groups_per_stage:
            raise ValueError(
                f"{here}, but with rollout.oversample = {self.rollout.oversample} a stage trains all of its "
                f"{self.groups_per_stage} groups, so none could be continued in the next stage: set "
                "rollout.oversample above 1, for example to 2"
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
        """``[rollout]`` with the changes of ``[stages.N]``; the final evaluation uses the last stage's."""
        own = self.stages.get(str(min(stage, self.schedule.stages - 1)), StageTable())
        return self.rollout.model_copy(update=own.model_dump(exclude_none=True))

    @property
    def distinct_rollouts(self) -> dict[int, RolloutTable]:
        """`rollout_of` every stage that has a ``[stages.N]``, and of the first stage that has none for all others."""
        numbers = {int(name) for name in self.stages}
        others = (stage for stage in range(self.schedule.stages) if stage not in numbers)
        return {stage: self.rollout_of(stage) for stage in sorted({*numbers, next(others, 0)})}

    @property
    def devices_per_node(self) -> int:
        """GPUs, or CPU cores, that a node needs. Trainers and engines share them, except in a live run side by side."""
        trainers = self.actor.processes_per_node
        engines = max(table.workers * table.tensor_parallel for table in self.distinct_rollouts.values())
        return trainers + engines if self.schedule.side_by_side else max(trainers, engines)

    @property
    def virtual_pipeline_stages(self) -> int | None:
        """Model chunks of each pipeline rank; None: a single one, without the interleaved schedule."""
        return self.megatron.get("virtual_pipeline_model_parallel_size")

    @property
    def groups_per_stage(self) -> int:
        """Groups that a stage trains on."""
        return self.schedule.updates_per_pass * self.schedule.prompts_per_update

    @property
    def groups_per_choice(self) -> int:
        """Groups that are chosen together: those of a stage, or in a live run those of the updates between versions."""
        return self.schedule.updates_of_groups // self.schedule.passes * self.schedule.prompts_per_update

    @property
    def candidates_per_choice(self) -> int:
        """The most groups that are generated to choose `groups_per_choice`."""
        # computed with the recipe's decimal number, not its float: 10 groups at 1.1 are 11 candidates, not 12
        return math.ceil(self.groups_per_choice * Fraction(str(self.rollout.oversample)))

    @property
    def candidates_per_stage(self) -> int:
        """The most groups that a stage generates, of which `groups_per_stage` are chosen."""
        choices, rest = divmod(self.groups_per_stage, self.groups_per_choice)
        return choices * self.candidates_per_choice + rest

    @property
    def leaves_groups(self) -> bool:
        """Whether a stage leaves groups, finished or not, to the next one, which trains them (partial rollouts)."""
        return self.rollout.token_budget is not None

    def groups_begun(self, stage: int) -> range:
        """The ids of the groups that a stage begins. A group's id is the index of its prompt in the run's sequence.

        Groups that the previous stage left are candidates, too: a stage only begins as many as that one trained.
        """
        size = self.candidates_per_stage
        if not self.leaves_groups or stage == 0:
            return range(stage * size, (stage + 1) * size)
        end = size + stage * self.groups_per_stage
        return range(end - self.groups_per_stage, end)

    def stage_that_begins(self, group: int) -> int:
        """The stage that begins the group with this id: the inverse of `groups_begun`."""
        size = self.candidates_per_stage
        if not self.leaves_groups or group < size:
            return group // size
        return 1 + (group - size) // self.groups_per_stage

    def updates_of_group(self, group: int) -> range:
        """The updates of a live run of which one is the first to train a group: with ``rollout.oversample`` the group's
        place among several is not known yet."""
        if self.rollout.oversample > 1:
            size = self.schedule.updates_of_groups
            first = group // self.candidates_per_choice * size
            return range(first, first + size)
        first = self.schedule.first_update_of(group // self.schedule.prompts_per_update)
        return range(first, first + 1)

    @property
    def prompts_needed(self) -> int:
        """The number of prompts that the whole run may need."""
        return self.groups_begun(self.schedule.stages - 1).stop

    @property
    def mixes_policies(self) -> bool:
        """Whether the tokens that a stage trains come from several policies."""
        return not self.schedule.one_policy or self.leaves_groups
