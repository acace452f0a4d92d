"""``python -m tests.rollout.actor_scores``: scores sequences with the Megatron actor; reads and writes JSON lines.

Input: {"model": directory, "sequences": token ids}. Output, after "SCORES ": for each sequence its log-probs [n - 1]
and, if the model has experts, those to which the actor routes the tokens, [n - 1][layers][k]. It runs in a process of
its own, because an engine and Megatron would both initialise the default process group.
"""

import functools
import json
import sys

import torch

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.recipe.load import parse_recipe


@functools.cache
def load(path):
    tables = {
        "model": {"path": path},
        "data": {"source": "reasoning_gym", "train": "spell_backward"},
        "reward": {"kind": "reasoning_gym"},
        "actor": {"backend": "cpu"},
    }
    recipe = parse_recipe(tables)
    if not torch.distributed.is_initialized():
        parallel.initialize(recipe)
    from megarl.actor import hf, model, routing
    from megarl.models.hf_config import read_hf_config

    models = model.build_model(read_hf_config(path), recipe)
    hf.load_hf(models, path)
    routing.install(models, replays=False)
    return models, routing.routings(models[0])


def main() -> None:
    become_single_process()
    for line in sys.stdin:
        request = json.loads(line)
        models, layers = load(request["model"])
        from megarl.actor import reference

        answers = []
        for sequence in request["sequences"]:
            (logprobs,) = reference.score(models, [sequence], 256, torch.device("cpu"))
            experts = torch.stack([layer.own for layer in layers], 1).tolist() if layers else None
            answers.append({"logprobs": logprobs.tolist(), "experts": experts})
        print("SCORES", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
