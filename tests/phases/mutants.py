"""Mistakes that a run could make after a kill, each in a few lines. A kill test that overlooks one tests nothing.

`tests.zygote` calls one of these in a process that is to become `megarl`, whose phases are forks of it.
"""

from dataclasses import replace

from megarl.actor import checkpoint
from megarl.phases import optimize, updates


def every_update_trains_the_first_groups():
    def read(self, update):
        return self.store.read(self.stage.groups_of_update(self.store.chosen, 0))

    optimize.SealedBatches.read = read


def an_update_trains_the_groups_that_follow_its_own():
    def read(self, update):
        update = (update + 1) % self.stage.run.recipe.schedule.updates_per_stage
        return self.store.read(self.stage.groups_of_update(self.store.chosen, update))

    optimize.SealedBatches.read = read


def rewards_go_to_the_neighbours():
    """The groups are the right ones, as all metrics of rewards say."""
    right = updates.to_samples

    def to_samples(groups, *options):
        samples = right(groups, *options)
        advantages = [sample.advantage for sample in samples]
        return [
            replace(sample, advantage=advantage)
            for sample, advantage in zip(samples, [*advantages[1:], advantages[0]], strict=True)
        ]

    updates.to_samples = to_samples


def adam_starts_anew():
    checkpoint.set_adam_step = lambda optimizer, step: None


def weights_are_those_of_the_stages_beginning():
    right = optimize.resume

    def resume(actor, start):
        parameters = [parameter.data for model in actor.models for parameter in model.parameters()]
        before = [parameter.clone() for parameter in parameters]
        right(actor, start)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)

    optimize.resume = resume


def an_update_is_left_out():
    right = updates.make_updates

    def make_updates(actor, stage, start, *rest):
        right(actor, stage, replace(start, done=start.done + 1), *rest)

    optimize.make_updates = make_updates


MUTANTS = [
    every_update_trains_the_first_groups,
    an_update_trains_the_groups_that_follow_its_own,
    rewards_go_to_the_neighbours,
    adam_starts_anew,
    weights_are_those_of_the_stages_beginning,
    an_update_is_left_out,
]
