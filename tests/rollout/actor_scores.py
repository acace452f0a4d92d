"""Scores of the Megatron actor, for a process of its own: an engine and Megatron would both initialise the default
process group."""

import functools

import torch

from megarl.actor import parallel
from megarl.distributed import become_single_process
from tests.actor.conftest import make_recipe


@functools.cache
def load(path):
    recipe = make_recipe(path)
    if not torch.distributed.is_initialized():
        become_single_process()
        parallel.initialize(recipe)
    from megarl.actor import hf, model, routing
    from megarl.models.hf_config import read_hf_config

    models = model.build_model(read_hf_config(path), recipe)
    hf.load_hf(models, path)
    routing.install(models, replays=False)
    return models, routing.routings(models[0])


def scores(path, sequences):
    """For each sequence of token ids its log-probs [n - 1] and, if the model has experts, those to which the actor
    routes the tokens, [n - 1, layers, k]."""
    models, layers = load(path)
    from megarl.actor import reference

    found = []
    for sequence in sequences:
        (logprobs,) = reference.score(models, [sequence], 256, torch.device("cpu"))
        found.append((logprobs, torch.stack([layer.own for layer in layers], 1).numpy() if layers else None))
    return found
