"""The rehearsal: synthetic responses that fill every rank, three updates, and exports that are compared."""

import os
import subprocess
import sys

import numpy as np
import pytest

from megarl.phases.rehearse import MICRO_BATCHES, _groups
from megarl.recipe.load import load_recipe, override_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir

HF = {"vocab_size": 30}


@pytest.mark.parametrize(("longest", "ranks"), [(100, 1), (100, 2), (30, 1), (10, 1)])
def test_responses_fill_the_micro_batches_of_every_rank(recipe, longest, ranks):
    settings = ["schedule.prompts_per_update=32", "rollout.responses_per_prompt=8", "actor.tokens_per_micro_batch=2560"]
    table = override_recipe(load_recipe(recipe), [*settings, f"rollout.max_response_tokens={longest}"])
    groups = list(_groups(table, HF, np.random.default_rng(0), ranks))
    lengths = np.array([len(response.tokens) for group in groups for response in group.responses])
    wanted = min(longest * 256, MICRO_BATCHES * ranks * 2560)
    assert lengths.max() == longest
    assert lengths.min() >= 1
    assert lengths.sum() == pytest.approx(wanted, rel=0.07)


SCRIPT = """
import sys, torch
from megarl.actor import step
from megarl.actor.model import PolicyModel
from megarl.phases import entry, export, rehearse, updates

made, make = [], updates.train_step
updates.train_step = lambda *arguments: made.append(make(*arguments)) or made[-1]
{fault}
code = entry.run_process("rehearse", sys.argv[1], 0)
print("updates", len(made))
sys.exit(code)
"""
OLD_HEAD = """
write, old = export.hf.export_hf, []
def with_an_old_head(models, *arguments):
    head = next(p for n, p in models[0].named_parameters() if n.endswith("{name}")).data
    new = head.clone()
    head.copy_(old[0])  # as if a shard of the last update had not arrived
    info = write(models, *arguments)
    head.copy_(new)
    return info
export.hf.export_hf = with_an_old_head
before = updates.train_step
def keep(actor, *arguments):
    old[:] = [next(p for n, p in actor.models[0].named_parameters() if n.endswith("{name}")).data.clone()]
    return before(actor, *arguments)
updates.train_step = keep
"""


@pytest.mark.parametrize("name", ["", "output_layer.weight"])
def test_three_updates_are_made_and_an_export_with_old_weights_is_noticed(recipe, tmp_path, name):
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.base)
    script = SCRIPT.format(fault=OLD_HEAD.format(name=name) if name else "")
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found = subprocess.run([sys.executable, "-c", script, run.root], env=environment, capture_output=True, text=True)
    assert "updates 3" in found.stdout, found.stderr
    assert found.returncode == bool(name), found.stderr
    if name:
        assert "the exported policy has not the optimizer's weights of" in found.stderr and f"{name} (" in found.stderr
