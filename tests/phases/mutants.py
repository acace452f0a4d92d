"""Faults of an engine and of an actor, each injected by replacing a function of megarl.

`tests.zygote` calls one of these functions in the process that becomes `megarl`; the phases are forks of that process.
"""

import itertools
import math
from dataclasses import replace

from megarl.phases import rollout_worker


def returning(fault, which):
    """`_Requests.receive`, but ``fault`` changes the completions of whose number, from 0, ``which`` is true."""
    right, numbers = rollout_worker._Requests.receive, itertools.count()

    def receive(self, completions):
        return right(self, [(to, fault(one) if which(next(numbers)) else one) for to, one in completions])

    return receive


def nan(completion):
    return replace(completion, logprobs=completion.logprobs * math.nan)


def an_engine_errs_now_and_then():
    """In several ways, and never twice in a row at the same response."""
    ways = itertools.cycle((nan, lambda one: replace(one, tokens=one.tokens + 10**6)))
    rollout_worker._Requests.receive = returning(lambda one: next(ways)(one), lambda number: number % 7 == 2)


def an_engine_only_returns_nan():
    rollout_worker._Requests.receive = returning(nan, lambda number: True)


def an_export_has_the_head_of_before_the_third_update():
    """As if a shard of the third update, the last, had not arrived."""
    from megarl.phases import export, updates

    write, make, before = export.hf.export_hf, updates.train_step, []

    def head(model):
        return next(p for n, p in model.named_parameters() if n.endswith("output_layer.weight")).data

    def written(models, *arguments):
        (_, _, old), new = before, head(models[0]).clone()
        head(models[0]).copy_(old)
        info = write(models, *arguments)
        head(models[0]).copy_(new)
        return info

    def made(actor, *arguments):
        before.append(head(actor.models[0]).clone())
        return make(actor, *arguments)

    export.hf.export_hf, updates.train_step = written, made
