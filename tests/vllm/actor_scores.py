"""``python -m tests.vllm.actor_scores MODEL``: the Megatron actor's log-probs of the sequences on stdin, as JSON.

In a process of its own, for an engine and Megatron both want the default process group.
"""

import json
import sys

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
    from megarl.actor import hf, model, reference
    from megarl.models.hf_config import read_hf_config

    models = model.build_model(read_hf_config(sys.argv[1]), recipe)
    hf.load_hf(models, sys.argv[1])
    scores = reference.score(models, json.load(sys.stdin), 256, device)
    print(json.dumps([values.tolist() for values in scores]))


if __name__ == "__main__":
    main()
