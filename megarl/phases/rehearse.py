"""The rehearse phase: updates on synthetic responses, an export and a checkpoint, before a run generates anything.

Otherwise a problem of the actor (a layer that this machine cannot run, a layout that does not fit into memory, a disk
that is too small for a checkpoint) would show only after the first rollouts, which may take hours. Parameters that an
update changes reach the other ranks during the next forward pass, so a mistake there shows in the third update at the
earliest, or in exported weights that are not those of the optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.actor import checkpoint, hf, parallel, reference
from megarl.actor.optimizer_state import distributed_optimizers
from megarl.actor.step import Actor
from megarl.models.hf_config import read_hf_config
from megarl.phases.export import Exporter
from megarl.phases.stop import StopRequest
from megarl.phases.updates import Start, build_actor, make_updates
from megarl.recipe.tables import Recipe, ScheduleTable
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import make_directory
from megarl.storage.metrics.trackers import NONE as NO_TRACKERS
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import RunDir, Stage

UPDATES, LEARNING_RATE = 3, 1e-3  # so large that bfloat16 weights of different updates differ
MICRO_BATCHES = 2  # per data-parallel rank, so that gradients accumulate and a pipeline has several in flight


def rehearse(stage: Stage) -> None:
    """Rehearse in the directory ``stage.run.rehearsal`` with the recipe's layout; errors propagate. Collective."""
    stop = StopRequest()
    device = parallel.initialize(stage.run.recipe)
    trial = _trial(stage)
    actor = build_actor(trial, device, Start())
    make_updates(actor, trial, Start(), SyntheticBatches(actor), stop, Exporter(actor, trial))
    ((_, path),) = checkpoints(trial.checkpoints)
    read_back(actor, path)
    if stage.run.recipe.actor.lora is None:  # else the exported weights are those that the optimizer has no part in
        compare_export(actor, trial.next.policy)


def _trial(stage: Stage) -> Stage:
    """A stage of `UPDATES` updates in a run of its own, which starts from the policy of ``stage``. Collective."""
    root, before = stage.run.rehearsal, stage.run.recipe
    prompts = before.schedule.prompts_per_update
    schedule = ScheduleTable(stages=1, updates_per_stage=UPDATES, prompts_per_update=prompts)
    table = before.run.model_copy(update={"tensorboard": False, **NO_TRACKERS})
    changes: dict[str, Any] = {"schedule": schedule, "stages": {}, "run": table}
    changes["actor"] = before.actor.model_copy(update={"checkpoint_every": UPDATES})
    fast = {"lr": LEARNING_RATE, "warmup_updates": 0, "schedule": "constant", "min_lr": 0.0}
    changes["optimizer"] = before.optimizer.model_copy(update=fast)
    recipe = before.model_copy(update=changes)
    trial = RunDir(root, recipe).stage(0)
    if dist.get_rank() == 0:
        make_directory(trial.directory)
        os.symlink(stage.policy, trial.policy)
    dist.barrier()
    return trial


class SyntheticBatches:
    """Groups of random tokens with the actor's own log-probs; implements `megarl.phases.updates.Batches`.

    Response lengths are uniform. Their mean is the length with which all responses together fill `MICRO_BATCHES`
    micro-batches on each data-parallel rank, but at most the maximum, which one response has.
    Half of a group's responses have reward 1, the others 0.
    """

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def read(self, update: int) -> list[Group]:
        recipe, config = self.actor.recipe, read_hf_config(self.actor.recipe.model.path)
        rng = np.random.default_rng(update)
        groups = list(_groups(recipe, config, rng, parallel.data_parallel_ranks()))
        whole = [[*g.prompt_tokens.tolist(), *r.tokens.tolist()] for g in groups for r in g.responses]
        scores = iter(reference.score(self.actor.models, whole, recipe.actor.tokens_per_micro_batch, self.actor.device))

        def scored(response: Response) -> Response:
            logprobs = next(scores)[-len(response.tokens) :].clip(max=0)
            return replace(response, rollout_logprobs=logprobs.astype(np.float32))

        return [replace(g, responses=tuple(map(scored, g.responses))) for g in groups]

    def trained(self, updates: int) -> None: ...


def _groups(recipe: Recipe, hf: dict[str, Any], rng: np.random.Generator, ranks: int) -> Iterator[Group]:
    size, longest = recipe.rollout.responses_per_prompt, recipe.rollout.max_response_tokens
    tokens = MICRO_BATCHES * ranks * recipe.actor.tokens_per_micro_batch
    number = recipe.schedule.prompts_per_update
    mean = max(1, min(longest, tokens // (number * size)))
    spread = min(mean - 1, longest - mean)
    for index in range(number):
        prompt = rng.integers(0, hf["vocab_size"], min(8, recipe.data.max_prompt_tokens)).astype(np.int32)
        responses = []
        for sample in range(size):
            length = longest if index == sample == 0 else int(rng.integers(mean - spread, mean + spread + 1))
            answer = rng.integers(0, hf["vocab_size"], length).astype(np.int32)
            experts = None
            if recipe.actor.trains_recorded_experts:
                experts = _experts(hf, rng, len(prompt) + length - 1)
            unknown = np.zeros(length, np.float32)
            responses.append(Response(answer, unknown, float(sample % 2), "stop", 0, routed_experts=experts))
        yield Group(index, prompt, tuple(responses))


def _experts(hf: dict[str, Any], rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Random expert ids, [tokens, layers, top_k] int16, distinct for each token and layer."""
    chosen = rng.random((tokens, hf["num_hidden_layers"], hf["num_experts"])).argsort(axis=2)
    return chosen[:, :, : hf["num_experts_per_tok"]].astype(np.int16)


def read_back(actor: Actor, path: Path) -> None:
    """Set the actor to zeros and load the checkpoint; `RuntimeError` unless weights and optimizer are as before.

    Collective.
    """
    if damage := checkpoint.verify(path):
        raise RuntimeError(f"the checkpoint {path} is damaged right after it was written: {damage}")
    state = dict(_state(actor))
    before = {name: _fingerprint(tensor) for name, tensor in state.items()}
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    checkpoint.load(actor, path)
    lost = [name for name, tensor in _state(actor) if _fingerprint(tensor) != before[name]]
    _refuse("a checkpoint does not restore", lost)


def compare_export(actor: Actor, policy: Path) -> None:
    """Load an exported policy into the actor; `RuntimeError` unless it has the optimizer's weights. Collective.

    They are compared where the rank owns them, as master weights in float32.
    """
    names = {parameter: name for model in actor.models for name, parameter in model.named_parameters()}
    owned = []
    for part in distributed_optimizers(actor.optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            shard = part.optimizer.param_groups[group]["params"][order]
            master = part.optimizer.state[shard].get("master_param", shard).detach()
            if parameter.dtype == torch.float32:  # the master weights are the model's
                master = master.clone()
            place = part._get_model_param_range_map(parameter)["param"]
            owned.append((names[parameter], parameter.detach().view(-1)[place.start : place.end], master))
    hf.load_hf(actor.models, policy)
    wrong = [name for name, exported, master in owned if not _same(exported, master)]
    _refuse("the exported policy has not the optimizer's weights of", wrong)


def _same(exported: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether bfloat16 weights are ``master`` rounded; float32 weights may have been stored in 16 bits."""
    rounded = master.to(exported)
    if exported.dtype == torch.float32:
        return torch.allclose(exported, rounded, rtol=2**-7, atol=1e-7)  # rounded up or down
    return torch.equal(exported, rounded)


def _refuse(what: str, names: list[str]) -> None:
    """`RuntimeError` if any rank has ``names`` of tensors that are wrong. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    for rank, wrong in enumerate(everyone):
        if wrong:
            raise RuntimeError(f"{what} {wrong[0]} ({len(wrong)} tensors of rank {rank})")


def _state(actor: Actor) -> Iterator[tuple[str, torch.Tensor]]:
    for index, model in enumerate(actor.models):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # weights that are frozen because of adapters are in no checkpoint
                yield f"{name} of chunk {index}", parameter
    for index, part in enumerate(distributed_optimizers(actor.optimizer)):
        for parameter, tensors in enumerate(part.optimizer.state.values()):
            for name, tensor in tensors.items():
                if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                    yield f"{name} of parameter {parameter} of optimizer {index}", tensor
        masters = (parameter for group in part.optimizer.param_groups for parameter in group["params"])
        for parameter, tensor in enumerate(masters):
            yield f"master weights of parameter {parameter} of optimizer {index}", tensor


def _fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    wide = tensor.detach().double()
    return float(wide.sum()), float(wide.square().sum())
