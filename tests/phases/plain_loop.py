"""The updates of a run as one loop in one process, without phases, checkpoints or restarts: the reference.

And the log-probs of its responses as transformers computes them.
"""

import functools

import torch
from transformers import AutoModelForCausalLM

from megarl.actor import hf, packing, parallel
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.step import Actor, train_step
from megarl.distributed import become_single_process
from megarl.objectives import build_objective
from megarl.phases.samples import to_samples
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir


def groups_to_train(run):
    """The groups of all updates in order, those of several passes once; a plain search finds them among candidates."""
    recipe, found = run.recipe, []
    wanted = recipe.groups_per_choice
    size = round(wanted * recipe.rollout.oversample)
    for stage in run.stages():
        store = RolloutStore(stage.rollouts, one_policy=not recipe.mixes_policies)
        groups = store.read(store.group_ids)
        if recipe.rollout.token_budget:  # the first that are complete
            found += groups[:wanted]
            continue
        for first in range(stage.groups.start, stage.groups.stop, size):
            choice = [group for group in groups if first <= group.group_id < first + size]
            choice.sort(key=lambda group: len({response.reward for response in group.responses}) == 1)
            found += sorted(choice[:wanted], key=lambda group: group.group_id)
    return found


def train(rank, root, result, copies=None):
    """Train the first policy of the run in ``root`` on its rollouts and export the trained policy to ``result``.

    copies: a folder for copies of the actor before each step, which are its proximal policies: before the updates that
    train the groups of one policy, or before ``proximal_updates`` of them.
    """
    become_single_process()
    run = RunDir.open(root)
    recipe, schedule = run.recipe, run.recipe.schedule
    device = parallel.initialize(recipe)
    actor = Actor.build(recipe, run.stage(0).policy, device)
    objective = build_objective(recipe.objective.name, recipe.objective.fields)
    groups = groups_to_train(run)
    period = schedule.sync_every or schedule.updates_per_stage  # updates that train the same batches in all passes
    step, batches = recipe.objective.fields.get("proximal_updates", period), period // schedule.passes
    for update in range(schedule.total_updates):
        first = (update // period * batches + update % period % batches) * schedule.prompts_per_update
        batch = groups[first : first + schedule.prompts_per_update]
        samples = to_samples(batch, recipe.objective, recipe.actor.trains_recorded_experts)
        share = actor.models[0].shares_prompts
        micro_batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, device, share=share)
        if copies and update % step == 0:
            copy = copies / f"{update:06d}"
            hf.export_hf(actor.models, copy, run.stage(0).policy, update)
            fields = ("old_logprobs", *["routed_experts"] * (recipe.actor.routing_replay == "actor"))
            frozen = [FrozenPolicy.build(fields, recipe, copy)]
            frozen += [FrozenPolicy.build(("ref_logprobs",), recipe, run.stage(0).policy)]
        for policy in frozen if copies else ():
            micro_batches = policy.annotate(micro_batches)
        train_step(actor, micro_batches, objective, actor.learning_rate(update + 1))
    hf.export_hf(actor.models, result, run.stage(0).policy, schedule.total_updates)


@functools.cache
def load(policy):
    return AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager")


@torch.inference_mode()
def logprobs_under(policy, group, response, temperature):
    """[n] float32: log-probs of a response's tokens under a policy, at the temperature at which they were sampled."""
    tokens = torch.tensor([[*group.prompt_tokens.tolist(), *response.tokens.tolist()]])
    rows = load(policy)(input_ids=tokens, use_cache=False).logits[0, -len(response.tokens) - 1 : -1].float()
    return (rows / temperature).log_softmax(-1).gather(1, tokens[0, -len(response.tokens) :, None])[:, 0].numpy()
