"""Runs of the tiny recipe whose stages are filled with random responses, without an engine."""

import hashlib
from dataclasses import replace

import numpy as np

from megarl.commands.stages.pack import CARD, MANIFEST, Manifest, sums_below
from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy, read_info
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.storage.run_dir import RunDir

SETTINGS = ("schedule.updates_per_stage=2", "eval.every=0", "actor.checkpoint_every=2")
VOCABULARY = 16  # of the random tokens; that of the model is larger


def make_run(recipe, root, *settings, chosen=None):
    run = RunDir.create(root, load_recipe(recipe, [*SETTINGS, *settings]))
    stage = run.stage(0)
    copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, stage.policy)
    fill(stage, chosen=chosen)
    return run


def fill(stage, chosen=None):
    """Fill the stage with random groups, and seal it."""
    rng, info = np.random.default_rng(stage.number), read_info(stage.policy)

    def response():
        n = int(rng.integers(2, 7))
        tokens, logprobs = rng.integers(3, VOCABULARY, n).astype(np.int32), -rng.exponential(2.0, n).astype(np.float32)
        return Response(tokens, logprobs, float(rng.integers(2)), "stop", info.version)

    def group(number):
        prompt = rng.integers(3, VOCABULARY, 4).astype(np.int32)
        return Group(number, prompt, tuple(response() for _ in range(stage.rollout.responses_per_prompt)))

    with RolloutWriter(stage.rollouts, weights_hash=info.weights_hash, logprob_mode="processed") as writer:
        for begin in range(stage.groups.start, stage.groups.stop, 4):
            writer.append(list(map(group, range(begin, begin + 4))))
    seal(stage.rollouts, stage.groups, chosen)


def agree(folder, **fields):
    """Replace the manifest of a packed directory by one with other ``fields`` that the files agree with."""
    files = {name: sums for name, sums in sums_below(folder).items() if name not in (MANIFEST, CARD)}
    replace(Manifest.read(folder), files=files, **fields).write(folder)


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
