"""``python -m tests.sglang.actor_scores MODEL``: what the Megatron actor makes of the sequences on stdin, as JSON.

For each sequence its log-probs [n - 1] and, of a model with experts, those it sends the tokens to: [n - 1][layers][k].
"""

import json
import sys

import torch

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.recipe.load import parse_recipe


def main() -> None:
    become_single_process()
    tables = {
        "model": {"path": sys.argv[1]},
        "data": {"source": "reasoning_gym", "train": "spell_backward"},
        "reward": {"kind": "reasoning_gym"},
        "actor": {"backend": "cpu"},
    }
    recipe = parse_recipe(tables)
    device = parallel.initialize(recipe)
    from megarl.actor import hf, model, reference, routing
    from megarl.models.hf_config import read_hf_config

    models = model.build_model(read_hf_config(sys.argv[1]), recipe)
    hf.load_hf(models, sys.argv[1])
    routing.install(models, replays=False)
    layers = routing.routings(models[0])
    answers = []
    for sequence in json.load(sys.stdin):
        (logprobs,) = reference.score(models, [sequence], 256, device)
        experts = torch.stack([layer.own for layer in layers], 1).tolist() if layers else None
        answers.append({"logprobs": logprobs.tolist(), "experts": experts})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
