"""An incomplete or damaged policy directory is refused; transformers would fill in missing weights at random."""

import json
import shutil

import pytest
import torch

from megarl.errors import UserError
from megarl.rollout.builtin import BuiltinEngine
from tests.rollout.tiny_models import changed


def tensors(change):
    return lambda path: changed(path, change)


def config(**settings):
    def damage(path):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return damage


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "cannot load the policy"),
        (lambda path: (path / "model.safetensors").unlink(), "cannot load the policy.*model.safetensors"),
        (truncate, "cannot load the policy.*not fully covered"),
        (tensors(lambda state: state.pop("lm_head.weight")), "missing_keys lm_head.weight"),
        (tensors(lambda state: state.pop(EXPERT)), "cannot load the policy.*conversion"),
        (tensors(lambda state: state.update(stray=torch.zeros(3))), "unexpected_keys stray"),
        (tensors(lambda state: state.update({"lm_head.weight": torch.zeros(40, 64)})), "mismatched_keys .*lm_head"),
        (config(num_hidden_layers="two"), "cannot load the policy.*num_hidden_layers"),
        (config(model_type="nonesuch"), "cannot load the policy.*nonesuch"),
        (config(model_type="x", auto_map={"AutoConfig": "code.C"}), "cannot load the policy.*custom code"),
    ],
)
def test_a_damaged_policy_directory_is_refused_and_the_error_names_the_damage(moe_dir, tmp_path, damage, message):
    damage(path := shutil.copytree(moe_dir, tmp_path / "policy"))
    with pytest.raises(UserError, match=f"(?s){message}"):
        BuiltinEngine(path, 0)
