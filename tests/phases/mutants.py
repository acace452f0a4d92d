"""Faults of an engine and of an actor, each planted by replacing a function of megarl.

`tests.zygote` calls one of these functions in the process that becomes `megarl`; the phases are forks of that process.
"""

import itertools
import math
import time
from dataclasses import replace

import numpy as np

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


def the_second_and_the_fifth_update_are_not_finite():
    """Because of the first response of each: its inputs are finite, the product of ratio and advantage is not."""
    from megarl.phases import updates

    right, numbers = updates.to_samples, itertools.count(1)

    def to_samples(*arguments):
        first, *others = right(*arguments)
        if next(numbers) in (2, 5):
            first = replace(first, advantage=3.3e38, rollout_logprobs=first.rollout_logprobs - 1)
        return [first, *others]

    updates.to_samples = to_samples


def recorded_experts(versions):
    """[n, layers, top_k] int8: experts of the tiny model that tell a token's place, its policy and the layer apart."""
    places = np.arange(len(versions)) + versions // 4
    return ((places[:, None, None] + 2 * np.arange(2)[:, None] + np.arange(2)) % 8).astype(np.int8)


def an_engine_records_experts_and_rests_until_it_is_interrupted():
    """With ``schedule.partial`` it rests in the fifth request under a policy: trainers need the four before it."""
    from megarl.rollout import builtin

    complete = builtin._Decoder._completion

    def completed(self, row, length, finish_reason):
        experts = recorded_experts(np.full(self.lengths[row] + length - 1, self.version))
        return replace(complete(self, row, length, finish_reason), routed_experts=experts)

    def build(recipe, stage, policy_dir, version, routed_experts):
        engine = builtin.BuiltinEngine(policy_dir, version)
        step = engine.step

        def rest_or_step():
            if engine._number < 4 or not engine.decoding_tokens:
                return step()
            time.sleep(0.005)  # for trainers, on the same cores
            return []

        if recipe.schedule.partial:
            engine.step = rest_or_step
        return engine

    builtin._Decoder._completion = completed
    builtin.RECORDS_EXPERTS, builtin.build = frozenset({"cpu"}), build
