"""Bytes and floating-point operations of a run, by formulas that the tests check by hand and against real models.

Sizes of the optimize phase are for the torch-native modules in bfloat16 with float32 gradients, Megatron's distributed
optimizer, and `kernels.linear_logprob`. Sizes that depend on the model family come from `megarl.models`. In all
functions ``hf`` is the model's config.json and ``parameters`` the number of all its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megarl.models import family_of
from megarl.planner import activations
from megarl.planner.assumptions import GIB as GIB
from megarl.planner.assumptions import Assumptions as Assumptions
from megarl.planner.parameter_counts import StageParameters
from megarl.recipe.layout import Layout
from megarl.recipe.megatron import SCALINGS, scaling_of
from megarl.recipe.optimizer import OptimizerBytes, offloaded
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Gpu:
    memory: float  # bytes that a process can allocate
    flops: float  # bfloat16 a second, dense, as the vendor states it
    bandwidth: float  # bytes a second of its memory
    fp8: bool = True  # whether it can multiply in 8 bits
    fp8_transposes: bool = True  # whether its 8-bit products of the backward pass need transposed copies of the weights


GPUS = {
    "a100": Gpu(79.1 * GIB, 312e12, 2.04e12, fp8=False),
    "h100": Gpu(79.1 * GIB, 989e12, 3.35e12),
    "h200": Gpu(139.8 * GIB, 989e12, 4.8e12),
    "h20": Gpu(95.1 * GIB, 148e12, 4.0e12),
    "b200": Gpu(178.3 * GIB, 2250e12, 8.0e12, fp8_transposes=False),
}


def data_parallel(layout: Layout) -> int:
    """Replicas of the weights outside experts."""
    return layout.ranks // (layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel)


def expert_data_parallel(layout: Layout) -> int:
    """Replicas of the experts' weights."""
    return layout.ranks // (layout.expert_parallel * layout.expert_tensor_parallel * layout.pipeline_parallel)


def optimize_memory(
    hf: dict[str, Any],
    recipe: Recipe,
    layout: Layout,
    stage: int,
    counts: StageParameters,
    frozen: int,
    gpu: Gpu,
    assume: Assumptions,
) -> dict[str, float]:
    """Bytes on one GPU of a pipeline stage at the peak of an update, by what holds them.

    stage: number of the pipeline stage, whose parameters are ``counts``. frozen: number of frozen policies.
    """
    tokens = micro_batch_tokens(recipe)
    parameters = counts.dense + counts.expert
    in_flight = activations.micro_batches_in_flight(layout, stage, micro_batches_per_rank(recipe, layout, assume))
    kept = activations.stage_bytes(hf, recipe, layout, stage, counts, tokens, in_flight, assume.expert_imbalance)
    last = stage == layout.pipeline_parallel - 1
    head = head_bytes(hf, layout, tokens, gpu, frozen=bool(counts.adapters)) if last else 0.0
    wide = recipe.megatron_ddp.get("grad_reduce_in_fp32", True)
    items = {
        "weights, bf16": 2.0 * (parameters + counts.adapters),
        f"gradients, {'fp32' if wide else 'bf16'}": (4.0 if wide else 2.0) * counts.trained,
        "optimizer, fp32 master and two moments": OptimizerBytes.of(recipe).gpu * owned_parameters(layout, counts),
        "frozen policies, bf16": 2.0 * parameters * frozen,
        "weights, fp8 and transposed": fp8_copies(recipe, gpu) * (counts.matrices + counts.expert) * (1 + frozen),
        "activations": kept,  # also with adapters: they keep the inputs that frozen matrices do not
        "log-probs, chunked, and the head's gradient": head,
        # when the optimizer steps, activations and log-probs have been freed
        "widened gradients, beyond activations": max(0.0, widened_bytes(recipe, layout, counts) - kept - head),
    }
    return {"CUDA, NCCL and workspaces": assume.runtime_bytes} | items


def fp8_copies(recipe: Recipe, gpu: Gpu) -> float:
    """Bytes of the 8-bit copies that Transformer Engine caches of each weight; 0 without fp8."""
    name = scaling_of(recipe.megatron)
    if name is None:
        return 0.0
    scaling = SCALINGS[name]
    return scaling.weight * (2 if scaling.transposes or gpu.fp8_transposes else 1)


def owned_parameters(layout: Layout, counts: StageParameters) -> float:
    """Number of parameters whose optimizer state a rank holds."""
    dense = counts.trained_dense / (data_parallel(layout) * layout.context_parallel)
    return dense + counts.trained_expert / expert_data_parallel(layout)


def widened_bytes(recipe: Recipe, layout: Layout, counts: StageParameters) -> float:
    """Bytes of the float32 copies that the optimizer makes of bfloat16 gradients when it steps.

    The precision-aware optimizer on the GPU needs no copies.
    """
    host = offloaded(recipe)
    aware = recipe.megatron_optimizer.get("use_precision_aware_optimizer", False) and not host
    if aware or recipe.megatron_ddp.get("grad_reduce_in_fp32", True):
        return 0.0
    return 4 * (1 - host) * owned_parameters(layout, counts)


def head_bytes(hf: dict[str, Any], layout: Layout, tokens: int, gpu: Gpu, frozen: bool = False) -> float:
    """Bytes of `kernels.linear_logprob` with backend torch, in its backward pass on the last pipeline stage.

    For a chunk of tokens: logits in float32, their exponentials in float32 and their gradient in bf16. For the head,
    unless it is frozen: its gradient in float32 and in bf16. For the trained tokens: gathered hidden states and their
    gradient.
    """
    rows = math.ceil(hf["vocab_size"] / layout.tensor_parallel)
    tokens //= layout.context_parallel
    chunk = min(gpu.memory / 64, 4 * tokens * rows)  # kernels.linear_logprob.buffer_bytes
    of_head = 0 if frozen else (4 + 2) * rows * hf["hidden_size"]
    return 2.5 * chunk + of_head + 3 * 2 * tokens * hf["hidden_size"]


def micro_batch_tokens(recipe: Recipe) -> int:
    """Tokens of the largest micro-batch: a sequence longer than the budget gets a micro-batch to itself."""
    return max(recipe.actor.tokens_per_micro_batch, longest_sequence(recipe))


def longest_sequence(recipe: Recipe) -> int:
    """Tokens of a prompt and response of the greatest length that the recipe allows."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens


def mean_sequence(recipe: Recipe, assume: Assumptions) -> float:
    """Tokens of a prompt and response, on average."""
    prompt = assume.mean_prompt * recipe.data.max_prompt_tokens
    return prompt + assume.mean_response * recipe.rollout.max_response_tokens


def responses_per_update(recipe: Recipe) -> int:
    return recipe.schedule.prompts_per_update * recipe.rollout.responses_per_prompt


def micro_batches_per_rank(recipe: Recipe, layout: Layout, assume: Assumptions) -> int:
    """Micro-batches of one update on each data-parallel rank."""
    tokens = responses_per_update(recipe) * mean_sequence(recipe, assume) / data_parallel(layout)
    return max(1, math.ceil(tokens / recipe.actor.tokens_per_micro_batch))


def kv_bytes_per_token(hf: dict[str, Any], tensor_parallel: int) -> int:
    """Bytes of the bf16 keys and values of one token in all layers, on one GPU."""
    return 2 * family_of(hf).cached_elements(hf, tensor_parallel)


def state_bytes(hf: dict[str, Any], tensor_parallel: int) -> float:
    """Bytes of a running response's bf16 states on one GPU, in layers with a state instead of keys and values."""
    return 2 * family_of(hf).state_elements(hf, tensor_parallel)


def rollout_memory(
    hf: dict[str, Any], recipe: Recipe, parameters: int, gpu: Gpu, assume: Assumptions
) -> dict[str, float]:
    """Bytes on one GPU of an engine replica; the KV cache gets what remains of the engine's share, at least 0."""
    tensor, kind = recipe.rollout.tensor_parallel, "fp8" if in_8_bits(recipe) else "bf16"
    items = {
        f"weights, {kind}": engine_weights(hf, recipe, parameters) / tensor,
        "activations and CUDA graphs": assume.engine_bytes,
        "logits and log-probs of a step": decoding_logit_bytes(hf, recipe),
    }
    items["KV cache"] = max(0.0, engine_share(hf, recipe, gpu, assume) - sum(items.values()))
    return items


def in_8_bits(recipe: Recipe) -> bool:
    """Whether the recipe tells the engine to quantise the bfloat16 weights to 8 bits."""
    options = getattr(recipe.rollout, recipe.rollout.engine, {})
    return bool(options) and options.get("quantization") == "fp8"


def engine_weights(hf: dict[str, Any], recipe: Recipe, parameters: float) -> float:
    """Bytes of ``parameters`` weights in an engine.

    In 8 bits, embeddings and head stay bfloat16. Routers and norms do too, but are not counted, nor are scales. (vLLM
    0.32 converts layer by layer while it loads, so it needs no more memory then.)
    """
    if not in_8_bits(recipe):
        return 2.0 * parameters
    return parameters + (1 if hf.get("tie_word_embeddings") else 2) * float(hf["vocab_size"] * hf["hidden_size"])


def engine_share(hf: dict[str, Any], recipe: Recipe, gpu: Gpu, assume: Assumptions) -> float:
    """Bytes of a GPU that an engine fills.

    ``rollout.memory_fraction`` is the share of the whole engine, but in SGLang of weights and KV cache alone. Without
    it vLLM 0.32 takes .92, and SGLang 0.5.23 leaves 10 GiB to everything else on GPUs of more than 60 GiB.
    """
    fraction = recipe.rollout.memory_fraction
    if recipe.rollout.engine == "sglang":
        rest = assume.engine_bytes + decoding_logit_bytes(hf, recipe)
        return gpu.memory - 10 * GIB + rest if fraction is None else fraction * gpu.memory + rest
    return (fraction or 0.92) * gpu.memory


def decoding_logit_bytes(hf: dict[str, Any], recipe: Recipe) -> float:
    """Bytes of logits and log-probs in a decoding step, for one token of every response.

    These are the logits as the head gives them, of this rank's share and of all ranks; a copy in float32 if the head
    gives bf16; and log-probs in float32.
    """
    tensor, width = recipe.rollout.tensor_parallel, 4 if recipe.rollout.float32_head else 2
    share = width / tensor if tensor > 1 else 0
    return engine_responses(recipe) * hf["vocab_size"] * (width + share + 4 * (width == 2) + 4)


def active_parameters(hf: dict[str, Any], parameters: int) -> int:
    """Parameters used by a token: all except the input embedding and the experts to which it is not routed."""
    embedding = 0 if hf.get("tie_word_embeddings") else hf["vocab_size"] * hf["hidden_size"]
    if not hf["num_experts"]:
        return int(parameters - embedding)
    return int(parameters - embedding - _expert_parameters(hf) * (hf["num_experts"] - hf["num_experts_per_tok"]))


def _expert_parameters(hf: dict[str, Any]) -> int:
    """Parameters of one expert, summed over all layers that have experts."""
    family = family_of(hf)
    return family.feed_forward.expert_parameters(hf) * family.sparse_layers(hf)


def forward_flops(hf: dict[str, Any], active: int, length: float) -> float:
    """Operations for one sequence of ``length`` tokens: two per active weight and token, plus those of attention."""
    return 2 * active * length + family_of(hf).mixing_flops(hf, length)


def optimize_seconds(
    hf: dict[str, Any],
    recipe: Recipe,
    layout: Layout,
    parameters: int,
    extra_passes: float,
    gpu: Gpu,
    assume: Assumptions,
) -> float:
    """Seconds of one update: forward, backward, recompute and forward-only passes, with the pipeline's bubble.

    The stage with the most layers sets the pace of all. Frozen weights need only half of the backward pass, since they
    have no gradients; the arithmetic of adapters is not counted.
    """
    length = mean_sequence(recipe, assume)
    one = forward_flops(hf, active_parameters(hf, parameters), length)
    again = activations.repeated_share(hf, recipe, layout, one, length)
    passes = (3 if recipe.actor.lora is None else 2) + again + extra_passes
    micro = micro_batches_per_rank(recipe, layout, assume)
    stages = layout.stage_layers(hf["num_hidden_layers"])
    slowest = max(stages) * len(stages) / sum(stages)
    bubble = (1 + (layout.pipeline_parallel - 1) / layout.virtual_stages / micro) * slowest
    mfu = assume.mfu_experts if hf["num_experts"] else assume.mfu_dense
    return responses_per_update(recipe) * one * passes * bubble / (layout.ranks * gpu.flops * mfu)


def engine_responses(recipe: Recipe) -> int:
    """Responses that an engine replica decodes together at most: the limit with which `megarl.rollout` starts it."""
    return recipe.rollout.groups_per_chunk * recipe.rollout.responses_per_prompt


def cached_tokens(recipe: Recipe, assume: Assumptions) -> float:
    """Tokens that a running response has in the KV cache, on average: its prompt and half of itself."""
    return mean_sequence(recipe, assume) - assume.mean_response * recipe.rollout.max_response_tokens / 2


def running_responses(
    hf: dict[str, Any], recipe: Recipe, parameters: int, nodes: int, gpu: Gpu, assume: Assumptions
) -> float:
    """Responses that a replica decodes together: the least of its limit, the room in its KV cache, and its work."""
    fit = responses_that_fit(hf, recipe, parameters, gpu, assume, cached_tokens(recipe, assume))
    return max(1.0, min(fit, engine_responses(recipe), responses_of_version(recipe, nodes)))


def responses_of_version(recipe: Recipe, nodes: int) -> float:
    """Responses that a replica generates with one policy."""
    return groups_of_version(recipe) * recipe.rollout.responses_per_prompt / (nodes * recipe.rollout.workers)


def groups_of_version(recipe: Recipe) -> int:
    """Groups that one policy generates; in a live run as many of a stage as the schedule allows."""
    schedule = recipe.schedule
    if schedule.kind == "staged":
        return recipe.candidates_per_stage
    rule = schedule.lag_rule
    updates = rule.max_lag + 1 if rule.delay is None else rule.sync_every
    return min(recipe.groups_per_stage, updates * schedule.prompts_per_update)


def responses_that_fit(
    hf: dict[str, Any], recipe: Recipe, parameters: int, gpu: Gpu, assume: Assumptions, tokens: float
) -> float:
    """Number of responses of ``tokens`` tokens each that the cache of a replica holds."""
    cache = rollout_memory(hf, recipe, parameters, gpu, assume)["KV cache"]
    tensor = recipe.rollout.tensor_parallel
    return cache / (tokens * kv_bytes_per_token(hf, tensor) + state_bytes(hf, tensor))


def versions_of_stage(recipe: Recipe) -> int:
    """Number of policies that trainers export and engines load in a stage."""
    return recipe.schedule.updates_per_stage // (recipe.schedule.sync_every or recipe.schedule.updates_per_stage)


def load_seconds(recipe: Recipe, parameters: int, replicas: int, assume: Assumptions) -> float:
    """Seconds for starting a stage's engines and loading weights, which every replica reads from shared storage.

    Engines that share their GPUs with trainers start anew each time that the trainers have used up the rollouts.
    """
    schedule, starts = recipe.schedule, 1
    if schedule.colocate:
        starts = math.ceil(schedule.updates_per_stage / (schedule.lag_rule.max_lag + 1))
    read = 2.0 * parameters * replicas / assume.storage
    return starts * assume.engine_start + versions_of_stage(recipe) * read


def responses_per_replica(recipe: Recipe, nodes: int) -> float:
    """Responses of a stage that each replica generates.

    With a token budget this is the number that a stage trains, on average: each stage also begins responses that later
    stages finish.
    """
    partial = recipe.rollout.token_budget is not None
    groups = recipe.groups_per_stage if partial else recipe.candidates_per_stage
    return groups * recipe.rollout.responses_per_prompt / (nodes * recipe.rollout.workers)


def rollout_seconds(
    hf: dict[str, Any], recipe: Recipe, parameters: int, nodes: int, gpu: Gpu, assume: Assumptions
) -> float:
    """Seconds for all responses of a stage."""
    response = assume.mean_response * recipe.rollout.max_response_tokens
    running = running_responses(hf, recipe, parameters, nodes, gpu, assume)
    step = decode_step_seconds(hf, recipe, parameters, running, gpu, assume)
    return responses_per_replica(recipe, nodes) / running * response * step


def decode_step_seconds(
    hf: dict[str, Any], recipe: Recipe, parameters: int, running: float, gpu: Gpu, assume: Assumptions
) -> float:
    """Seconds in which a replica generates one token of each of ``running`` responses.

    The step is limited by reading weights and KV cache, or by arithmetic, whichever takes longer.
    """
    tensor = recipe.rollout.tensor_parallel
    held = cached_tokens(recipe, assume)
    cached = held * kv_bytes_per_token(hf, tensor) + state_bytes(hf, tensor)
    read = engine_weights(hf, recipe, touched_parameters(hf, parameters, running)) / tensor + running * cached
    work = 2 * active_parameters(hf, parameters) * running / tensor
    return max(read / gpu.bandwidth, work / gpu.flops) / assume.decode_efficiency


def touched_parameters(hf: dict[str, Any], parameters: int, tokens: float) -> float:
    """Expected number of parameters that a decoding step of ``tokens`` tokens reads, with uniform routing."""
    if not hf["num_experts"]:
        return parameters
    idle: float = (1 - hf["num_experts_per_tok"] / hf["num_experts"]) ** tokens
    return parameters - _expert_parameters(hf) * hf["num_experts"] * idle
