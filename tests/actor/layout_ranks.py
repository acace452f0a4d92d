"""What one rank of `test_layout_matrix` computes: all layouts of one world size in turn, in the same processes."""

import shutil
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
from tests.actor.conftest import make_recipe
from tests.extent import EVERY, few

UPDATES, FEW = 20 if EVERY else 6, 3  # a resumed one makes six
# they make all updates; between them they have all kinds of parallelism
LONG = ("one", "TP2 EP4", "CP2 PP2", "DP2 EP2")
PROMPTS = 4  # groups per update


@dataclass(frozen=True)
class Case:
    objective: str
    fields: dict[str, Any] = field(default_factory=dict)
    updates: int = FEW
    routing_replay: str = "none"
    optimizer: dict[str, Any] = field(default_factory=dict)


CASES = {
    "mu_grpo": Case("mu_grpo", updates=UPDATES),
    "m2po": Case("m2po", {"m2_threshold": 0.04}, UPDATES),
    "gspo": Case("gspo", {"eps_low": 0.05, "eps_high": 0.05}, UPDATES),
    "minpro": Case("minpro", updates=UPDATES),
    "bapo": Case("bapo"),
    "ess scaling": Case("reinforce", optimizer={"ess_scaling": True, "schedule": "cosine"}),
    "frozen policies": Case(
        "grpo",
        {"aggregation": "sequence_mean", "kl": {"coefficient": 0.1}, "truncated_importance": {"maximum": 1.1}},
    ),
    "replay actor": Case("mu_grpo", routing_replay="actor"),
    "replay engine": Case("mu_grpo", routing_replay="engine"),
}


def updates_of(name: str, case: str) -> int:
    return CASES[case].updates if name in LONG else FEW


@dataclass(frozen=True)
class Layout:
    ranks: int
    actor: dict[str, int] = field(default_factory=dict)
    megatron: dict[str, int] = field(default_factory=dict)


LAYOUTS = {
    "one": Layout(1),  # with whole sequences; in all others responses share their prompts
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
# those of the matrix
MATRIX = few(LAYOUTS, "one", "one, shared prompts", "TP2 EP2", "PP2 VPP2", "CP2 PP2", "DP2 EP2")
MATRIX_CASES = few(CASES, "mu_grpo", "m2po", "frozen policies", "replay actor", "replay engine")


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
    tables["megatron"] = layout.megatron | tables.get("megatron", {})
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


def run_layout(name: str, model: Path, rollouts: Path, folder: Path) -> dict[str, Any]:
    """For every case: the first gradient, and the metrics of all updates, which only the last pipeline stage knows."""
    from megarl.actor import frozen, packing, parallel, step

    recipe = recipe_of(LAYOUTS[name], model)
    parallel.build_groups(recipe)
    results: dict[str, Any] = {"reports": parallel.reports_metrics()}

    def micro_batches(actor: Any, samples: list[Any]) -> list[Any]:
        assert actor.models[0].shares_prompts
        return packing.micro_batches(samples, 128, actor.device, share=name != "one")

    for case in MATRIX_CASES:
        settings = CASES[case]
        objective, replay = build_objective(settings.objective, settings.fields), settings.routing_replay
        # the layout "one" recomputes nothing, so the comparison with it tests replay under recomputation
        recompute = "full" if replay != "none" and name != "one" else "none"
        table = {"recompute": recompute, "routing_replay": replay}
        recipe = recipe_of(LAYOUTS[name], model, actor=table, optimizer=settings.optimizer)
        actor = step.Actor.build(recipe, model, torch.device("cpu"))
        if replay == "actor":
            actor.frozen.append(frozen.FrozenPolicy.build(("routed_experts",), recipe, model))
        for wanted in ("ref_logprobs", "old_logprobs"):
            if wanted in objective.requires:
                actor.frozen.append(frozen.FrozenPolicy.build((wanted,), recipe, model))
        samples = update_samples(rollouts, 0, replay)
        batches = micro_batches(actor, samples)
        if case == "mu_grpo":
            results["logprobs"] = logprobs(actor, batches, len(samples))
        step.compute_gradients(actor, batches, objective)
        gradient = whole_gradient(actor, model, folder / f"gradient {name}")
        metrics = []
        for update in range(updates_of(name, case)):
            samples = update_samples(rollouts, update, replay)
            batches = micro_batches(actor, samples)
            metrics.append(step.train_step(actor, batches, objective, lr=1e-3, samples=len(samples)))
        tokens = [line.pop("sample_tokens", {}).get("counts") for line in metrics]
        results[case] = {"gradient": gradient, "metrics": metrics, "micro_batches": len(batches), "tokens": tokens[0]}
    results["scores"] = reference_scores(recipe, model)
    results["offenders"] = offenders(recipe, model, update_samples(rollouts, 0))
    return results


def logprobs(actor: Any, batches: list[Any], samples: int) -> list[torch.Tensor]:
    """The log-probs of each sample's response, on the ranks of the last pipeline stage."""
    from megatron.core import parallel_state as mpu

    from megarl.actor.schedule import collect, run_micro_batches

    found: dict[int, dict[int, float]] = {}
    for log in run_micro_batches(actor.replicas, batches, collect, forward_only=True):
        batch = log.batch
        sequences = batch.sequence_index[batch.sequence_ids]
        values = zip(sequences.tolist(), batch.positions.tolist(), batch.logprobs.tolist(), strict=True)
        for (sequence, position, value), trains in zip(values, batch.loss_mask.tolist(), strict=True):
            if trains:
                found.setdefault(sequence, {})[position] = value
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, found, group=group)
    whole: dict[int, dict[int, float]] = {}
    for part in everyone:
        for sequence, values in part.items():
            whole.setdefault(sequence, {}).update(values)
    if not whole:
        return []
    return [torch.tensor([v for _, v in sorted(whole.get(i, {}).items())]) for i in range(samples)]


def reference_scores(recipe: Recipe, model: Path) -> list[list[float]]:
    """Log-probs of five fixed sequences, computed as for the reference that is exported with a policy."""
    from megarl.actor import reference, step

    actor = step.Actor.build(recipe, model, torch.device("cpu"))
    for chunk in actor.models:
        chunk.temperature = 0.5  # scores are at temperature 1 all the same
    sequences = [[(7 * i + 3 * k) % 67 for i in range(n)] for k, n in enumerate((2, 9, 30, 61, 17))]
    scores = reference.score(actor.models, sequences, 32, actor.device)
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


def worker(rank: int, ranks: int, model: Path, rollouts: Path, folder: Path) -> None:
    join(rank, ranks, folder)
    from megatron.core import parallel_state as mpu

    for name in MATRIX:
        if LAYOUTS[name].ranks != ranks:
            continue
        results = run_layout(name, model, rollouts, folder)
        if results["reports"]:
            torch.save(results, folder / f"{name}.pt")
        dist.barrier()
        mpu.destroy_model_parallel()
    dist.destroy_process_group()


def continue_in(names: list[str], model: Path, rollouts: Path, folder: Path) -> dict[str, Any]:
    """{(layout of the checkpoint, layout that resumes): {update: loss}}, on the rank that reports metrics.

    Each layout makes 6 updates and saves a checkpoint after the first few. Then it makes the remaining updates again,
    from this checkpoint, which must give the same bits, and from those of all layouts before it.
    """
    from megarl.actor import checkpoint, packing, parallel, step

    objective = build_objective("mu_grpo", {})
    results: dict[str, Any] = {}
    for name in names:
        recipe = recipe_of(LAYOUTS[name], model)
        parallel.build_groups(recipe)

        def updates(actor: Any, numbers: range, recipe: Recipe = recipe) -> list[dict[str, float]]:
            def one(number: int) -> dict[str, float]:
                samples = update_samples(rollouts, number)
                batches = packing.micro_batches(samples, 128, actor.device, share=True)
                return step.train_step(actor, batches, objective, lr=1e-2)

            return [one(number) for number in numbers]

        def weights(actor: Any) -> list[torch.Tensor]:
            return [p.detach().clone() for chunk in actor.models for p in chunk.parameters()]

        saved_after = 1 + names.index(name) % 4
        straight = step.Actor.build(recipe, model, torch.device("cpu"))
        updates(straight, range(saved_after))
        checkpoint.save(straight, folder / name, saved_after, keep=1, wait=False)
        expected = updates(straight, range(saved_after, 6))  # while the checkpoint is written
        checkpoint.finish(straight)

        for source in names[: names.index(name) + 1]:
            resumed = step.Actor.build(recipe, model, torch.device("cpu"))
            (found,) = checkpoint.checkpoints(folder / source)
            done = checkpoint.load(resumed, found[1])
            metrics = updates(resumed, range(done, 6))
            if source == name:
                assert metrics == expected
                pairs = zip(weights(straight), weights(resumed), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), f"rank {dist.get_rank()}"
            if parallel.reports_metrics():
                results[source, name] = {done + 1 + i: m["loss"] for i, m in enumerate(metrics)}
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
    return results


def resume_worker(rank: int, ranks: int, names: list[str], model: Path, rollouts: Path, folder: Path) -> None:
    join(rank, ranks, folder)
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, continue_in(names, model, rollouts, folder))
    if rank == 0:
        torch.save({key: value for part in results for key, value in part.items()}, folder / "results.pt")
    dist.destroy_process_group()
