"""The updates of a staged run as one loop in one process, without phases, checkpoints or restarts: the reference."""

from megarl.actor import hf, packing, parallel
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.step import Actor, train_step
from megarl.distributed import become_single_process
from megarl.objectives import build_objective
from megarl.phases.samples import to_samples
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir


def train(rank, root, result, copies=None):
    """Train the first policy of the run in ``root`` on its rollouts and export the trained policy to ``result``.

    copies: a folder for copies of the actor before each step of three updates, which are its proximal policies.
    """
    become_single_process()
    run = RunDir.open(root)
    recipe, schedule = run.recipe, run.recipe.schedule
    device = parallel.initialize(recipe)
    actor = Actor.build(recipe, run.stage(0).policy, device)
    objective = build_objective(recipe.objective.name, recipe.objective.fields)
    for update in range(schedule.total_updates):
        stage, inside = divmod(update, schedule.updates_per_stage)
        batches = schedule.updates_per_stage // schedule.passes
        first = (stage * batches + inside % batches) * schedule.prompts_per_update
        store = RolloutStore(run.stage(stage).rollouts)
        samples = to_samples(store.read(range(first, first + schedule.prompts_per_update)), recipe.objective)
        share = actor.models[0].shares_prompts
        micro_batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, device, share=share)
        if copies and update % 3 == 0:
            hf.export_hf(actor.models, copies / str(update), run.stage(0).policy, update)
            proximal = FrozenPolicy.build(("old_logprobs",), recipe, copies / str(update))
        micro_batches = proximal.annotate(micro_batches) if copies else micro_batches
        train_step(actor, micro_batches, objective, actor.learning_rate(update + 1))
    hf.export_hf(actor.models, result, run.stage(0).policy, schedule.total_updates)
