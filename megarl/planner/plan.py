"""Memory and time of every phase of a recipe on some GPUs, or the first thing that does not fit.

Sizes of the optimize phase are for float32 gradients unless the recipe says otherwise, and Megatron's distributed
optimizer. What depends on the model alone comes from `megarl.planner.sizes`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from megarl.models import family_of
from megarl.objectives import build_objective, frozen_logprobs, updates_per_step
from megarl.planner import sizes
from megarl.planner.assumptions import GIB, Assumptions
from megarl.planner.parameter_counts import ParameterCounter, StageParameters
from megarl.planner.sizes import GPUS, Gpu
from megarl.recipe.layout import Layout
from megarl.recipe.megatron import shares_prompts
from megarl.recipe.names import ENGINES
from megarl.recipe.optimizer import STATE_BYTES, offloaded
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import expert_type


@dataclass(frozen=True)
class Plan:
    """Sizes (bytes) and times (seconds) of one recipe on ``nodes`` nodes."""

    recipe: Recipe
    hf: dict[str, Any]
    nodes: int
    gpu: str
    layout: Layout
    whole: StageParameters
    stages: list[StageParameters]
    assume: Assumptions = field(default_factory=Assumptions)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        hf: dict[str, Any],
        nodes: int,
        gpu: str,
        counter: ParameterCounter,
        assume: Assumptions | None = None,
    ) -> Plan:
        layout = Layout.of(recipe, nodes * recipe.actor.processes_per_node)
        stages, whole = counter.count(hf, recipe, layout.ranks), counter.whole(hf, recipe)
        return cls(recipe, hf, nodes, gpu, layout, whole, stages, assume or Assumptions())

    @property
    def device(self) -> Gpu:
        """The GPU; its memory is the assumed one if that is set."""
        kind = GPUS[self.gpu]
        return replace(kind, memory=self.assume.hbm or kind.memory)

    @property
    def assumed(self) -> dict[str, float]:
        """The values of all assumptions."""
        mfu = self.assume.mfu or (0.15 if self.hf["num_experts"] else 0.35)
        return asdict(self.assume) | {"hbm": self.device.memory, "mfu": mfu}

    @property
    def parameters(self) -> int:
        return self.whole.dense + self.whole.expert

    @property
    def active_parameters(self) -> int:
        return sizes.active_parameters(self.hf, self.whole)

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and response of the greatest length that the recipe allows."""
        return self.recipe.data.max_prompt_tokens + self.recipe.rollout.max_response_tokens

    @property
    def mean_response(self) -> float:
        """Tokens of a response, on average."""
        return self.assume.mean_response * self.recipe.rollout.max_response_tokens

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return self.assume.mean_prompt * self.recipe.data.max_prompt_tokens

    @property
    def mean_sequence(self) -> float:
        """Tokens of a prompt and response, on average."""
        return self.mean_prompt + self.mean_response

    @property
    def responses_per_update(self) -> int:
        return self.recipe.schedule.prompts_per_update * self.recipe.rollout.responses_per_prompt

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch: a sequence longer than the budget gets a micro-batch to itself."""
        return max(self.recipe.actor.tokens_per_micro_batch, self.longest_sequence)

    @cached_property
    def prompts_saved(self) -> int:
        """How many prompts fewer an update computes than it has responses, at most (`megarl.actor.packing`): in a group
        that fits in a micro-batch, the responses share their prompt."""
        settings = family_of(self.hf).megatron_settings(self.hf) | self.recipe.megatron
        if self.recipe.actor.layers != "torch" or not shares_prompts(settings):
            return 0
        return self.recipe.schedule.prompts_per_update * (self.recipe.rollout.responses_per_prompt - 1)

    @property
    def tokens_per_update(self) -> float:
        """Tokens that an update computes."""
        return self.responses_per_update * self.mean_sequence - self.prompts_saved * self.mean_prompt

    @property
    def micro_batches_per_rank(self) -> int:
        """Micro-batches of one update on each data-parallel rank."""
        tokens = self.tokens_per_update / self.layout.data_parallel
        return max(1, math.ceil(tokens / self.recipe.actor.tokens_per_micro_batch))

    @cached_property
    def frozen(self) -> int:
        """Number of frozen policies that the objective needs; each is one more model on the same ranks."""
        objective = build_objective(self.recipe.objective.definition, self.recipe.objective.fields)
        return len(frozen_logprobs(objective, self.recipe.schedule.sync_every))

    @cached_property
    def extra_passes(self) -> float:
        """Forward passes of an update that have no backward pass.

        The proximal policy of a step needs such a pass for every update of the step except the first.
        """
        objective = build_objective(self.recipe.objective.definition, self.recipe.objective.fields)
        exact = objective.needs_statistics and self.recipe.actor.statistics_scope == "exact"
        return self.frozen + int(exact) + 1 - 1 / updates_per_step(objective, self.recipe.schedule.sync_every)

    @cached_property
    def optimize(self) -> dict[str, float]:
        """Bytes on a GPU of the pipeline stage that needs most memory, by what holds them."""
        return max(map(self.optimize_stage, range(len(self.stages))), key=lambda items: sum(items.values()))

    def optimize_stage(self, stage: int) -> dict[str, float]:
        """Bytes on one GPU of a pipeline stage at the peak of an update, by what holds them."""
        hf, recipe, layout, counts = self.hf, self.recipe, self.layout, self.stages[stage]
        tokens, parameters = self.micro_batch_tokens, counts.dense + counts.expert
        in_flight = sizes.micro_batches_in_flight(layout, stage, self.micro_batches_per_rank)
        kept, layer = sizes.stage_bytes(hf, recipe, layout, stage, tokens, in_flight, self.assume.expert_imbalance)
        last = stage == layout.pipeline_parallel - 1
        head = sizes.head_bytes(hf, layout, tokens, self.device, frozen=bool(counts.adapters)) if last else 0.0
        wide, on_gpu = recipe.megatron_ddp.get("grad_reduce_in_fp32", True), 1 - offloaded(recipe)
        return {
            "CUDA, NCCL and workspaces": self.assume.runtime_memory,
            "weights, bf16": 2.0 * (parameters + counts.adapters),
            f"gradients, {'fp32' if wide else 'bf16'}": (4.0 if wide else 2.0) * counts.trained,
            "optimizer, fp32 master and two moments": on_gpu * STATE_BYTES * self._owned_parameters(counts),
            "frozen policies, bf16": 2.0 * parameters * self.frozen,
            "activations": kept,  # also with adapters: they keep the inputs that frozen matrices do not
            "backward pass of a layer, or of log-probs": max(layer, head),  # one after the other
        }

    def _owned_parameters(self, counts: StageParameters) -> float:
        """Number of parameters whose optimizer state a rank of a stage with these parameters holds."""
        dense = counts.trained_dense / (self.layout.data_parallel * self.layout.context_parallel)
        return dense + counts.trained_expert / self.layout.expert_data_parallel

    @cached_property
    def host(self) -> dict[str, float]:
        """Bytes of host memory that the optimize phase takes at most, on the node that needs most, by what holds them.

        A checkpoint is copied into pinned memory before it is written. torch rounds the size of each such tensor up to
        a power of two, and keeps the memory. State that is in host memory anyway is copied beside it.
        """
        ranks, share = self.recipe.actor.processes_per_node, offloaded(self.recipe)
        owned = ranks * max(map(self._owned_parameters, self.stages))  # by all ranks of a node
        weights = 2.0 * min(self.whole.trained, ranks * max(stage.trained for stage in self.stages))
        return {
            "optimizer": share * (STATE_BYTES + 4) * owned,  # with a copy of the gradients
            "checkpoint, pinned": 2 * (weights + (1 - share) * STATE_BYTES * owned),
            "optimizer, as it is written": share * STATE_BYTES * owned,
        }

    @property
    def usable(self) -> float:
        """Bytes of a GPU that the optimize phase can fill."""
        return self.device.memory * (1 - self.assume.fragmentation)

    @property
    def left_to_engines(self) -> float:
        """Bytes of a GPU that trainers in memory leave to an engine on the same GPU."""
        return self.usable - sum(self.optimize.values())

    def update_seconds(self) -> float:
        """Seconds of an update: all passes, with the pipeline's bubble.

        The stage with the most layers sets the pace of all. Frozen weights need only half of the backward pass, since
        they have no gradients; the arithmetic of adapters is not counted.
        """
        hf, layout, length = self.hf, self.layout, self.mean_sequence
        one = sizes.forward_flops(hf, self.active_parameters, length)
        saved = self.prompts_saved * sizes.forward_flops(hf, self.active_parameters, self.mean_prompt)
        again = sizes.repeated_share(hf, self.recipe, layout, one, length)
        passes = (3 if self.recipe.actor.lora is None else 2) + again + self.extra_passes
        stages = layout.stage_layers(hf["num_hidden_layers"])
        slowest = max(stages) * len(stages) / sum(stages)
        bubble = (1 + (layout.pipeline_parallel - 1) / layout.virtual_stages / self.micro_batches_per_rank) * slowest
        flops = layout.ranks * self.device.flops * self.assumed["mfu"]
        return (self.responses_per_update * one - saved) * passes * bubble / flops

    @cached_property
    def rollout(self) -> dict[str, float]:
        """Bytes on one GPU of an engine replica; the KV cache gets what remains of its share, at least 0."""
        items = {
            f"weights, {'fp8' if self._in_8_bits else 'bf16'}": self.engine_weights(self.parameters)
            / self.recipe.rollout.tensor_parallel,
            "activations, logits and CUDA graphs": self.assume.engine_memory,
        }
        items["KV cache"] = max(0.0, self.engine_share - sum(items.values()))
        return items

    @property
    def engine_share(self) -> float:
        """Bytes of a GPU that an engine fills.

        What ``rollout.memory_fraction`` means, and its default, depend on the engine (`megarl.recipe.names`).
        """
        engine, fraction = ENGINES[self.recipe.rollout.engine], self.recipe.rollout.memory_fraction
        share = engine.takes(self.device.memory) if fraction is None else fraction * self.device.memory
        return share + self.assume.engine_memory if engine.share_of_cache else share

    @property
    def _in_8_bits(self) -> bool:
        """Whether the recipe tells the engine to quantise the bfloat16 weights to 8 bits."""
        return self.recipe.rollout.options(self.recipe.rollout.engine).get("quantization") == "fp8"

    def engine_weights(self, parameters: float) -> float:
        """Bytes of ``parameters`` weights in an engine.

        In 8 bits, embeddings and head stay bfloat16. Routers and norms do too, but are not counted, nor are scales.
        (vLLM 0.32 converts layer by layer while it loads, so it needs no more memory then.)
        """
        if not self._in_8_bits:
            return 2.0 * parameters
        tables = 1 if self.hf.get("tie_word_embeddings") else 2
        return parameters + tables * float(self.hf["vocab_size"] * self.hf["hidden_size"])

    @property
    def _cache_bytes(self) -> tuple[int, float]:
        """Bytes on a GPU of an engine's bf16 cache for one token, and for a response whatever its length."""
        family, tensor = family_of(self.hf), self.recipe.rollout.tensor_parallel
        return 2 * family.cached_elements(self.hf, tensor), 2 * family.state_elements(self.hf, tensor)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit in the KV cache of a replica."""
        return int(self.rollout["KV cache"] / self._cache_bytes[0])

    def responses_that_fit(self, tokens: float) -> float:
        """Number of responses of ``tokens`` tokens each that the cache of a replica holds."""
        per_token, per_response = self._cache_bytes
        return self.rollout["KV cache"] / (tokens * per_token + per_response)

    @property
    def cached_tokens(self) -> float:
        """Tokens that a running response has in the KV cache, on average: its prompt and half of itself."""
        return self.mean_sequence - self.mean_response / 2

    @property
    def replicas(self) -> int:
        return self.nodes * self.recipe.rollout.workers

    @property
    def engine_responses(self) -> int:
        """Responses that a replica decodes together at most: the limit with which `megarl.rollout` starts it."""
        return self.recipe.rollout.groups_per_chunk * self.recipe.rollout.responses_per_prompt

    @property
    def responses_of_version(self) -> float:
        """Responses that a replica generates with one policy; in a live run as many as the schedule allows."""
        recipe, rule = self.recipe, self.recipe.schedule.lag_rule
        if rule.delay is not None:
            groups = min(recipe.candidates_per_stage, recipe.candidates_per_choice)
        else:
            groups = min(recipe.groups_per_stage, (rule.max_lag + 1) * recipe.schedule.prompts_per_update)
        return groups * recipe.rollout.responses_per_prompt / self.replicas

    @property
    def running_responses(self) -> float:
        """Responses that a replica decodes together: the least of its limit, its KV cache, and its work."""
        fit = self.responses_that_fit(self.cached_tokens)
        return max(1.0, min(fit, self.engine_responses, self.responses_of_version))

    def decode_step_seconds(self, running: float) -> float:
        """Seconds in which a replica generates one token of each of ``running`` responses.

        The step is limited by reading weights and KV cache, or by arithmetic, whichever takes longer.
        """
        tensor, (per_token, per_response) = self.recipe.rollout.tensor_parallel, self._cache_bytes
        touched = sizes.touched_parameters(self.hf, self.whole, running)
        read = self.engine_weights(touched) / tensor + running * (self.cached_tokens * per_token + per_response)
        work = 2 * self.active_parameters * running / tensor
        return max(read / self.device.bandwidth, work / self.device.flops) / self.assume.decode_efficiency

    @property
    def rollout_seconds(self) -> float:
        """Seconds for all responses of a stage.

        With a token budget these are as many as a stage trains, on average: each stage also begins responses that
        later stages finish.
        """
        recipe, running = self.recipe, self.running_responses
        groups = recipe.groups_per_stage if recipe.leaves_groups else recipe.candidates_per_stage
        each = groups * recipe.rollout.responses_per_prompt / self.replicas
        return each / running * self.mean_response * self.decode_step_seconds(running)

    @property
    def overlaps(self) -> bool:
        """Whether engines generate while trainers train; in lock-step each waits for the other."""
        return self.recipe.schedule.side_by_side and not self.recipe.schedule.lockstep

    @cached_property
    def disk(self) -> dict[str, float]:
        """Bytes on disk, by kind of file. A response is int32 tokens, float32 log-probs and, for routing replay, the
        experts of each token and layer; it is stored with its prompt."""
        recipe, hf = self.recipe, self.hf
        response = 4 * (self.mean_sequence + self.mean_response)
        if recipe.actor.trains_recorded_experts:
            each = hf["num_hidden_layers"] * hf["num_experts_per_tok"] * expert_type(hf["num_experts"]).itemsize
            response += self.mean_sequence * each
        return {
            "rollouts of a stage": recipe.candidates_per_stage * recipe.rollout.responses_per_prompt * response,
            "one checkpoint": (2.0 + STATE_BYTES) * self.whole.trained,
            "one policy": 2.0 * self.parameters,
        }

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Estimated seconds of each part of a stage."""
        update, updates, disk = self.update_seconds(), self.recipe.schedule.updates_per_stage, self.disk
        checkpoints = math.ceil(updates / self.recipe.actor.checkpoint_every)
        versions = math.ceil(updates / self.recipe.schedule.lag_rule.sync_every)  # exported and loaded
        storage = self.assume.storage
        # every replica reads each version's weights from shared storage
        load = self.assume.engine_start + versions * 2.0 * self.parameters * self.replicas / storage
        return {
            "load of the engines" if versions == 1 else f"{versions} loads of the engines": load,
            "rollouts": self.rollout_seconds,
            f"{updates} updates of {update:.1f} s": update * updates,
            f"{checkpoints} checkpoints": checkpoints * disk["one checkpoint"] / storage,
            "export" if versions == 1 else f"{versions} exports": versions * disk["one policy"] / storage,
        }

    @property
    def stage_seconds(self) -> float:
        load, rollouts, *training = self.seconds.values()
        both = load + rollouts, sum(training)
        return max(both) if self.overlaps else sum(both)

    def misfit(self) -> str | None:
        """The first item that does not fit, in the order in which a run allocates memory; None if everything fits."""
        return self.rollout_misfit() or self.optimize_misfit() or self.shared_misfit()

    def rollout_misfit(self) -> str | None:
        table, available = self.recipe.rollout, self.recipe.actor.processes_per_node
        wanted = table.workers * table.tensor_parallel
        if wanted > available and not self.recipe.schedule.side_by_side:
            return (
                f"rollout.workers * rollout.tensor_parallel = {wanted} GPUs a node, "
                f"but actor.processes_per_node = {available}"
            )
        memory, whole = self.engine_share, self.device.memory
        if memory > whole:
            return (
                f"rollout.memory_fraction = {table.memory_fraction}: {ENGINES[table.engine].title}'s share is of "
                f"weights and KV cache alone; with activations and CUDA graphs an engine takes {gib(memory)} of a "
                f"GPU's {gib(whole)}"
            )
        used = sum(self.rollout.values()) - self.rollout["KV cache"]
        if used > memory:
            share = f"{memory / whole:.0%} of a GPU are {gib(memory)}"
            return f"weights of a rollout engine: {gib(used)} with its activations, but {share}"
        if self.kv_tokens < self.longest_sequence:
            return (
                f"KV cache of a rollout engine: room for {self.kv_tokens} tokens, but one response of full length "
                f"with its prompt has {self.longest_sequence}"
            )
        return None

    def optimize_misfit(self) -> str | None:
        total, memory = 0.0, self.usable
        for name, size in self.optimize.items():
            if total + size > memory:
                left = f"only {gib(memory - total)} of {gib(memory)} are left"
                return f"optimize phase, {name}: {gib(size)} on a GPU, but {left}"
            total += size
        return None

    def shared_misfit(self) -> str | None:
        """Why engines do not fit in the memory that trainers leave with ``schedule.colocate``; None if they do."""
        if not self.recipe.schedule.colocate or self.engine_share <= self.left_to_engines:
            return None
        least = self.engine_share - self.left_to_engines
        return (
            f"schedule.colocate: engines have {gib(self.engine_share)} of a GPU, but trainers, which stay in memory, "
            f"leave {gib(self.left_to_engines)}: lower rollout.memory_fraction by {least / self.device.memory:.3f}"
        )


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
