"""Bugs that a resumed run could have, each injected by replacing a function of megarl.

The tests of kills must fail with each of them. `tests.zygote` calls one of these functions in the process that becomes
`megarl`; the phases are forks of that process.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

from megarl.actor import checkpoint
from megarl.phases import optimize, rollout_worker, updates
from megarl.rollout import builtin


def every_update_trains_the_first_groups():
    """Every update trains the batch of the stage's first update."""

    def read(self, update):
        return self.store.read(self.stage.groups_of_update(self.store.chosen, 0))

    optimize.SealedBatches.read = read


def an_update_trains_the_groups_that_follow_its_own():
    """Every update trains the batch of the next update."""

    def read(self, update):
        update = (update + 1) % self.stage.run.recipe.schedule.updates_per_stage
        return self.store.read(self.stage.groups_of_update(self.store.chosen, update))

    optimize.SealedBatches.read = read


def rewards_go_to_the_neighbours():
    """Each response gets the advantage of the next one. Groups and metrics of rewards stay as they are."""
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
    """Adam's moments are restored from the checkpoint, but its number of steps is not."""
    checkpoint.set_adam_step = lambda optimizer, step: None


def weights_are_those_of_the_stages_beginning():
    """Everything but the weights is restored from the checkpoint."""
    right = optimize.resume

    def resume(actor, start):
        parameters = [parameter.data for model in actor.models for parameter in model.parameters()]
        before = [parameter.clone() for parameter in parameters]
        right(actor, start)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)

    optimize.resume = resume


def an_update_is_left_out():
    """The first update after the checkpoint is skipped."""
    right = updates.make_updates

    def make_updates(actor, stage, start, *rest):
        right(actor, stage, replace(start, done=start.done + 1), *rest)

    optimize.make_updates = make_updates


def _returning(fault, which):
    """Let ``fault`` change the completions for which ``which`` of their number, from 0, is true."""
    right, numbers = rollout_worker._Requests.receive, itertools.count()

    def receive(self, completions):
        return right(self, [(to, fault(one) if which(next(numbers)) else one) for to, one in completions])

    rollout_worker._Requests.receive = receive


def _with_logprob(value, place=-1):
    def fault(completion):
        logprobs = completion.logprobs.copy()
        logprobs[place] = value
        return replace(completion, logprobs=logprobs)

    return fault


def an_engine_errs_now_and_then():
    """In each of several ways, and never twice in a row at the same response."""
    ways = itertools.cycle(FAULTS.values())
    _returning(lambda one: next(ways)(one), lambda number: number % 7 == 2)


def an_engine_only_returns_nan():
    _returning(_with_logprob(math.nan), lambda number: True)


def an_engine_scores_nan():
    """Also in the check of its weights."""
    right = builtin.BuiltinEngine.score
    builtin.BuiltinEngine.score = lambda self, sequences: [own * math.nan for own in right(self, sequences)]


def an_engine_samples_nan():
    """Its logits are NaN for half of the rows that decode together, in the check of its weights too."""
    right = builtin._Decoder._forward

    def forward(self, tokens, cache):
        logits = right(self, tokens, cache)
        logits[::2] = math.nan
        return logits

    builtin._Decoder._forward = forward


# what an engine may return and no engine should
FAULTS = {
    "nan": _with_logprob(math.nan),
    "nan at the first token": _with_logprob(math.nan, 0),
    "infinite": _with_logprob(math.inf),
    "minus infinite": _with_logprob(-math.inf),
    "positive": _with_logprob(0.5),
    "no tokens": lambda one: replace(one, tokens=one.tokens[:0], logprobs=one.logprobs[:0]),
    "too few log-probs": lambda one: replace(one, logprobs=one.logprobs[1:]),
    "too many tokens": lambda one: replace(one, tokens=one.tokens.repeat(99), logprobs=one.logprobs.repeat(99)),
    "negative token": lambda one: replace(one, tokens=one.tokens - 100),
    "unknown token": lambda one: replace(one, tokens=one.tokens + 10**6),
    "wide tokens": lambda one: replace(one, tokens=one.tokens.astype(np.int64)),
    "wide log-probs": lambda one: replace(one, logprobs=one.logprobs.astype(np.float64)),
    "unknown reason": lambda one: replace(one, finish_reason="abort"),
}

MUTANTS = [
    every_update_trains_the_first_groups,
    an_update_trains_the_groups_that_follow_its_own,
    rewards_go_to_the_neighbours,
    adam_starts_anew,
    weights_are_those_of_the_stages_beginning,
    an_update_is_left_out,
]
