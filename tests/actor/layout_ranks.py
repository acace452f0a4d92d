"""What one rank of `test_layout_matrix` computes: the cases of all layouts of one world size, in the same processes."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.objectives import build_objective
from megarl.recipe.tables import Recipe
from tests.actor.conftest import make_hf_model, make_recipe
from tests.extent import few

UPDATES = 6
PROMPTS = 4  # groups per update
SEQUENCES = [[(7 * i + 3 * k) % 67 for i in range(n)] for k, n in enumerate((2, 9, 30, 61, 17))]


@dataclass(frozen=True)
class Layout:
    ranks: int
    actor: dict[str, int] = field(default_factory=dict)
    megatron: dict[str, int] = field(default_factory=dict)


LAYOUTS = {
    "one": Layout(1),  # with whole sequences, without recomputation; in all others responses share their prompts
    "one, shared prompts": Layout(1),
    "TP2 ETP2": Layout(2, {"tensor_parallel": 2}),
    "TP2 EP2": Layout(2, {"tensor_parallel": 2, "expert_tensor_parallel": 1, "expert_parallel": 2}),
    "PP2": Layout(2, {"pipeline_parallel": 2}),
    "PP2 uneven": Layout(2, {"pipeline_parallel": 2}, {"num_layers_in_first_pipeline_stage": 1}),
    "CP2": Layout(2, {"context_parallel": 2}),
    "EP2": Layout(2, {"expert_parallel": 2}),
    "DP2": Layout(2),
    "PP2 VPP2": Layout(2, {"pipeline_parallel": 2}, {"virtual_pipeline_model_parallel_size": 2}),
    "TP2 PP2": Layout(4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "TP2 EP4": Layout(4, {"tensor_parallel": 2, "expert_tensor_parallel": 1, "expert_parallel": 4}),
    "CP2 PP2": Layout(4, {"context_parallel": 2, "pipeline_parallel": 2}),
    "DP2 EP2": Layout(4, {"expert_parallel": 2}),
    "TP2 CP2": Layout(4, {"tensor_parallel": 2, "context_parallel": 2}),
}
MATRIX = few(LAYOUTS, "one", "one, shared prompts", "TP2 EP2", "PP2 VPP2", "CP2 PP2", "DP2 EP2")


@dataclass(frozen=True)
class Case:
    objective: str = "mu_grpo"
    fields: dict[str, Any] = field(default_factory=dict)
    updates: int = 3
    layouts: tuple[str, ...] = MATRIX  # in the order of `LAYOUTS`; all but "one" are compared with it
    family: str = "qwen3_moe"
    routing_replay: str = "none"
    recompute: Any = "none"
    lora: dict[str, Any] | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    limit: float = 1e-5  # distance of the gradients, relative to their length
    continued: bool = False  # whether a checkpoint goes from layout to layout


# the layouts for which a family's layers have their own code, and the parts of them that these recompute
LAYERS = ("one", "TP2 EP2", "PP2 uneven", "CP2")
FAMILIES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "olmoe": (LAYERS[:2], ["core_attn", "layernorm", "moe"]),
    "qwen2_moe": (LAYERS[:2], ["layernorm", "mlp", "shared_experts"]),
    "glm4_moe": (LAYERS[:3], ["layernorm", "mlp", "moe"]),
    "deepseek_v3": (LAYERS, ["core_attn", "layernorm", "mlp", "shared_experts"]),
    "deepseek_v3_moonlight": (LAYERS[:2], ["core_attn", "moe"]),
    "qwen3_next": (LAYERS, ["core_attn", "layernorm", "moe"]),
    "gpt_oss": (LAYERS, ["core_attn", "layernorm", "moe"]),
    "qwen3_5_moe": (LAYERS[:3], ["layernorm", "moe", "shared_experts"]),
    "qwen3_5": (("one", "TP2 ETP2", "PP2 uneven"), ["core_attn", "layernorm", "mlp"]),  # without experts
    "glm4_moe_lite": (LAYERS[:2], ["core_attn", "layernorm", "mlp", "moe"]),
    "minimax_m2": (LAYERS[:2], ["core_attn", "layernorm", "moe"]),
}
# those with layers that no other family has
TRAINED = few(FAMILIES, "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss")
CONTINUED = few(("olmoe", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss"), "glm4_moe", "deepseek_v3")
LORA_LAYOUTS = ("one", "TP2 ETP2", "TP2 EP2", "PP2", "CP2", "EP2", "DP2", "PP2 VPP2")
LORA_LAYOUTS = few(LORA_LAYOUTS, "one", "TP2 EP2", "CP2", "PP2 VPP2")
EVERY_CASE = {
    "mu_grpo": Case(updates=UPDATES),
    "m2po": Case("m2po", {"m2_threshold": 0.04}, UPDATES),
    "gspo": Case("gspo", {"eps_low": 0.05, "eps_high": 0.05}, UPDATES),
    "minpro": Case("minpro", updates=UPDATES),
    "bapo": Case("bapo"),
    "ess scaling": Case("reinforce", optimizer={"ess_scaling": True, "schedule": "cosine"}),
    "frozen policies": Case(
        "grpo",
        {"aggregation": "sequence_mean", "kl": {"coefficient": 0.1}, "truncated_importance": {"maximum": 1.1}},
    ),
    "replay actor": Case(routing_replay="actor", recompute="full"),
    "replay engine": Case(routing_replay="engine", recompute="full"),
    **{
        name: Case(
            "reinforce", updates=2, layouts=layouts, family=name, recompute=parts, lr=1e-2, limit=1e-6,
            routing_replay="none" if name == "qwen3_5" else "actor", continued=name in CONTINUED,
        )
        for name, (layouts, parts) in FAMILIES.items()
    },
    **{
        f"adapters of {what}": Case(
            "reinforce", updates=2, layouts=LORA_LAYOUTS, family="glm4_moe", recompute="full", lr=1e-2, limit=1e-6,
            lora={"rank": 4, "alpha": 2.0, **targets}, continued=True,
        )
        for what, targets in {"all": {}, "experts": {"targets": ["experts.linear_fc1", "mlp.linear_fc2"]}}.items()
    },
}  # fmt: skip
CASES = {
    name: EVERY_CASE[name]
    for name in few(
        EVERY_CASE, "mu_grpo", "m2po", "frozen policies", "replay actor", "replay engine", *TRAINED,
        "adapters of all", "adapters of experts",
    )
}  # fmt: skip


def seal_models(folder: Path) -> None:
    """Write the models of all cases to ``folder``, and rollouts with the log-probs of a policy near Qwen3-MoE."""
    for name in {case.family for case in CASES.values()}:
        # a layer for each chunk of virtual stages where there are such
        layers = {"num_hidden_layers": 4 if name in ("qwen3_moe", "glm4_moe") else 3}
        shared = {"n_shared_experts": 2} if name == "glm4_moe" else {}
        model = make_hf_model(name, initializer_range=0.1, **layers, **shared)
        model.save_pretrained(folder / "models" / name)
        if name == "qwen3_moe":
            seal_rollouts(model, folder / "rollouts")


@torch.no_grad()
def seal_rollouts(model: Any, directory: Path, updates: int = UPDATES) -> None:
    """Write and seal random responses, with the log-probs of a policy near `model` as those of the behaviour policy."""
    from megarl.storage.rollouts import Group, Response, RolloutWriter, seal

    rng = np.random.default_rng(0)
    writer = RolloutWriter(directory, weights_hash="test", logprob_mode="exact")
    groups = []
    for group_id in range(updates * PROMPTS):
        prompt, responses = rng.integers(2, 67, rng.integers(1, 6)).astype(np.int32), []
        for sample in range(4):
            tokens = rng.integers(2, 67, rng.integers(1, 20)).astype(np.int32)
            sequence = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
            logprobs = model(sequence[None]).logits[0, :-1].log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
            stored = logprobs[-len(tokens) :].numpy() + rng.normal(size=len(tokens), scale=0.2)
            stored = np.minimum(stored, 0).astype(np.float32)
            mask = None
            if sample % 2:  # with tokens of tools between its turns, which have no loss
                mask = rng.random(len(tokens)) < 0.7
                mask[-1] = True
            responses.append(Response(tokens, stored, float(sample == group_id % 4), "stop", 0, loss_mask=mask))
        groups.append(Group(group_id, prompt, tuple(responses)))
    writer.append(groups)
    writer.close()
    seal(directory, range(len(groups)))


def recipe_of(layout: Layout, model: Path, **tables: Any) -> Recipe:
    actor = {"processes_per_node": layout.ranks, "tokens_per_micro_batch": 128} | layout.actor
    tables["actor"] = actor | tables.get("actor", {})
    tables["megatron"] = layout.megatron
    tables["optimizer"] = {"lr": 1e-3, "weight_decay": 0.01} | tables.get("optimizer", {})
    return make_recipe(model, **tables)


def update_samples(rollouts: Path, update: int, routing_replay: str = "none") -> list[Any]:
    """Samples of one update, as an optimize phase reads them; to replay "engine", with random recorded experts."""
    from megarl.phases.samples import to_samples
    from megarl.recipe.tables import ObjectiveTable
    from megarl.storage.rollouts import RolloutStore

    groups = RolloutStore(rollouts).read(range(update * PROMPTS, (update + 1) * PROMPTS))
    samples = to_samples(groups, ObjectiveTable(advantage="group_mean"))
    if routing_replay != "engine":
        return samples
    rng = np.random.default_rng(update)  # unknown experts (-1) for a fifth of the tokens
    experts = [rng.permuted(np.tile(np.arange(4, dtype=np.int8), (len(s), 4, 1)), axis=2)[:, :, :2] for s in samples]
    for chosen in experts:
        chosen[rng.random(len(chosen)) < 0.2] = -1
    for place, sample in enumerate(samples):
        if place % 4 in (1, 2):  # as in the first response of the group; the fourth has experts of its own
            before = len(sample.prompt_tokens) - 1
            experts[place][:before] = experts[place - place % 4][:before]
    return [replace(s, routed_experts=chosen) for s, chosen in zip(samples, experts, strict=True)]


def gather_gradient(actor: Any) -> None:
    """Give every data-parallel rank the whole gradient of the update just computed, of which it has one shard."""
    for replica in actor.replicas:
        for buckets in (*replica.bucket_groups, *replica.expert_parallel_bucket_groups):
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:  # each rank has reduced its own shard
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def whole_gradient(actor: Any, model: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The gradient of the update just computed: {Hugging Face name: tensor}, for the whole model.

    It is exported like a policy, with the gradient in the place of the parameters for the moment.
    """
    from megarl.actor.hf import export_hf

    gather_gradient(actor)
    weights = [[p.detach().clone() for p in chunk.parameters()] for chunk in actor.models]
    with torch.no_grad():
        for chunk in actor.models:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
        export_hf(actor.models, scratch, model, 0)
        for chunk, before in zip(actor.models, weights, strict=True):
            for parameter, value in zip(chunk.parameters(), before, strict=True):
                parameter.copy_(value)
    gradient = {name: tensor for file in scratch.glob("*.safetensors") for name, tensor in load_file(file).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return gradient


def build_actor(name: str, layout: str, folder: Path) -> Any:
    """The actor of a case, with its frozen policies; adapters are filled with random numbers, the same everywhere."""
    from megarl.actor import frozen, step

    case, model = CASES[name], folder / "models" / CASES[name].family
    recompute = "full" if case.recompute != "none" and layout == "PP2 uneven" else case.recompute
    recompute = "none" if layout == "one" else recompute
    table = {"recompute": recompute, "routing_replay": case.routing_replay, "lora": case.lora}
    recipe = recipe_of(LAYOUTS[layout], model, actor=table, optimizer=case.optimizer)
    actor = step.Actor.build(recipe, model, torch.device("cpu"))
    if case.routing_replay == "actor":
        actor.frozen.append(frozen.FrozenPolicy.build(("routed_experts",), recipe, model))
    for wanted in ("ref_logprobs", "old_logprobs"):
        if wanted in build_objective(case.objective, case.fields).requires:
            actor.frozen.append(frozen.FrozenPolicy.build((wanted,), recipe, model))
    return actor


def batches_of(actor: Any, name: str, layout: str, update: int, folder: Path) -> list[Any]:
    from megarl.actor import packing

    samples = update_samples(folder / "rollouts", update, CASES[name].routing_replay)
    share = layout != "one" and actor.models[0].shares_prompts
    return packing.micro_batches(samples, 128, actor.device, share=share)


def train(name: str, layout: str, folder: Path) -> dict[str, Any]:
    """The first gradient, and the metrics of all updates, which only the last pipeline stage knows."""
    from megarl.actor import step

    case, actor = CASES[name], build_actor(name, layout, folder)
    objective = build_objective(case.objective, case.fields)
    samples = len(update_samples(folder / "rollouts", 0))
    batches = batches_of(actor, name, layout, 0, folder)
    logprobs = response_logprobs(actor, batches) if name == "mu_grpo" else {}
    if case.lora:
        fill_adapters(actor)
    step.compute_gradients(actor, batches, objective)
    if case.lora:
        gradient = adapter_gradient(actor)
    else:
        gradient = whole_gradient(actor, folder / "models" / case.family, folder / f"gradient {layout}")
    metrics = []
    for update in range(case.updates):
        batches = batches_of(actor, name, layout, update, folder)
        metrics.append(step.train_step(actor, batches, objective, lr=case.lr, samples=samples))
    tokens = [line.pop("sample_tokens", {}).get("counts") for line in metrics]
    return {"gradient": gradient, "metrics": metrics, "tokens": tokens[0], "logprobs": logprobs}


@torch.no_grad()
def fill_adapters(actor: Any) -> None:
    """Give the adapters' B random numbers, without which A has no gradient."""
    from megarl.actor import lora

    for model in actor.models:
        for shard in lora.sharded_state(model).values():
            if shard.key.endswith(".b"):
                seed = sum(map(ord, shard.key))
                whole = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(seed)) / 20
                shard.data.copy_(whole[part_of(shard.global_offset, shard.data.shape)])


def part_of(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def adapter_gradient(actor: Any) -> dict[str, torch.Tensor]:
    """The gradients of all adapters, of the update just computed, as `whole_adapters`."""
    gather_gradient(actor)
    return whole_adapters(actor, lambda parameter: parameter.main_grad)


def whole_adapters(actor: Any, value: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """{key in a checkpoint: ``value(parameter)``} for all adapters, as whole tensors assembled from all ranks.

    Asserts that ranks with the same part of a tensor agree.
    """
    from megarl.actor import lora

    mine = [
        (tensor.key, tensor.global_shape, tensor.global_offset, value(tensor.data).detach().cpu().float())
        for model in actor.models
        for tensor in lora.sharded_state(model).values()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, torch.Tensor] = {}
    for key, shape, offset, part in (entry for rank in everyone for entry in rank):
        place = part_of(offset, part.shape)
        tensor = found.setdefault(key, torch.full(shape, torch.nan))
        assert bool(tensor[place].isnan().all()) or torch.allclose(tensor[place], part, rtol=1e-6, atol=1e-9), key
        tensor[place] = part
    return found


def policy(actor: Any, target: Path) -> dict[str, torch.Tensor]:
    """The tensors that training changes."""
    from megarl.actor.hf import export_hf
    from tests.actor.test_hf_layouts import stored

    if actor.recipe.actor.lora is not None:
        return {key: tensor.clone() for key, tensor in whole_adapters(actor, lambda parameter: parameter).items()}
    export_hf(actor.models, target, actor.recipe.model.path, 0)
    return stored(target)


def continued(name: str, layout: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of two policies: as the newest checkpoint, by another layout, gives it, and after one more update.

    The first layout finds no checkpoint and begins with the initial policy. The second policy is saved as a checkpoint.
    The layout "one" then goes on, and also gives the policy after the update of each layout that comes later.
    """
    from megarl.actor import checkpoint, step

    case, actor = CASES[name], build_actor(name, layout, folder)
    saved, target = folder / f"{name} checkpoints", folder / f"{name} {layout}"
    found = checkpoint.checkpoints(saved)
    done = checkpoint.load(actor, found[-1][1]) if found else 0
    policies = [policy(actor, target / "loaded")]
    for update in range(len(case.layouts) if layout == "one" else 1):
        batches = batches_of(actor, name, layout, (done + update) % 2, folder)
        step.train_step(actor, batches, build_objective(case.objective, {}), lr=case.lr)
        if update == 0:
            checkpoint.save(actor, saved, done + 1, keep=1)
        policies.append(policy(actor, target / f"after {update}"))
    return policies


def response_logprobs(actor: Any, batches: list[Any]) -> dict[tuple[int, int], float]:
    """{(sequence, position): log-prob} of all trained tokens; empty outside the last pipeline stage."""
    from megatron.core import parallel_state as mpu

    from megarl.actor.schedule import collect, run_micro_batches

    logs = run_micro_batches(actor.replicas, batches, collect, forward_only=True)
    mine = [log.batch.by_sequence(log.batch.logprobs) for log in logs]
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    parts = (part for rank in everyone for batch in rank for part in batch.items())
    return {(sequence, position): value for sequence, part in parts for position, value in part.items()}


def reference_scores(recipe: Recipe, model: Path) -> list[list[float]]:
    """Log-probs of `SEQUENCES`, computed as for the reference that is exported with a policy."""
    from megarl.actor import reference, step

    actor = step.Actor.build(recipe, model, torch.device("cpu"))
    for chunk in actor.models:
        chunk.temperature = 0.5  # scores are at temperature 1 all the same
    scores = reference.score(actor.models, SEQUENCES, 32, actor.device)
    assert {chunk.temperature for chunk in actor.models} == {0.5}
    return [values.tolist() for values in scores]


def offenders(recipe: Recipe, model: Path, samples: list[Any]) -> list[dict[str, Any]]:
    """Descriptions of the sequences that an update with one NaN names; empty outside the last pipeline stage.

    Asserts that all ranks refuse the update and keep their weights.
    """
    from megarl.actor import packing, step
    from megarl.actor.nonfinite import NonFiniteUpdate
    from megarl.phases.samples import describe

    actor = step.Actor.build(recipe, model, torch.device("cpu"))
    bad = max(range(len(samples)), key=lambda i: len(samples[i].response_tokens))
    stored = samples[bad].rollout_logprobs.copy()
    stored[-1] = np.nan
    samples[bad] = replace(samples[bad], rollout_logprobs=stored)
    before = [p.detach().clone() for chunk in actor.models for p in chunk.parameters()]
    batches = packing.micro_batches(samples, 128, actor.device, share=True)
    with pytest.raises(NonFiniteUpdate, match="not applied") as error:
        step.train_step(actor, batches, build_objective("mu_grpo", {}), lr=1e-3)
    after = [p for chunk in actor.models for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return [describe(o, samples[o.sequence]) for o in error.value.offenders]


def join(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks{ranks}", rank=rank, world_size=ranks)


def worker(rank: int, ranks: int, folder: Path) -> None:
    join(rank, ranks, folder)
    from megatron.core import parallel_state as mpu

    from megarl.actor import parallel

    model = folder / "models/qwen3_moe"
    for layout, settings in LAYOUTS.items():
        cases = [name for name, case in CASES.items() if layout in case.layouts]
        if settings.ranks != ranks or not cases:
            continue
        recipe = recipe_of(settings, model)
        parallel.build_groups(recipe)
        results: dict[str, Any] = {name: train(name, layout, folder) for name in cases}
        for name in cases:
            if CASES[name].continued:
                results[name]["continued"] = continued(name, layout, folder)
        if layout in MATRIX:
            results["scores"] = reference_scores(recipe, model)
            results["offenders"] = offenders(recipe, model, update_samples(folder / "rollouts", 0))
        if parallel.reports_metrics():
            torch.save(results, folder / f"{layout}.pt")
        results.clear()
        dist.barrier()
        mpu.destroy_model_parallel()
    dist.destroy_process_group()
