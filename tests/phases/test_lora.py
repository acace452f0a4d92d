"""A whole run that trains low-rank adapters: kills, exports from its checkpoints, and what is refused."""

import pytest
from safetensors.torch import load_file

from megarl.storage.checked_json import read_checked
from megarl.storage.policies import read_info
from tests.actor.test_lora import check_peft
from tests.helpers import megarl
from tests.phases.commands import succeed, train
from tests.phases.test_kill import assert_same_run, kill_at, moments

LORA = ("--set", "actor.lora.rank=4", "--set", "optimizer.lr=2e-3", "--set", "eval.every=0")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(recipe, run, *LORA)
    return run


@pytest.mark.crash
def test_a_killed_run_ends_with_the_same_bytes(undisturbed, recipe, tmp_path):
    killed = tmp_path / "killed"
    for stage, moment in ((0, "between checkpoints"), (0, "export"), (1, "last checkpoint under way")):
        kill_at(*moments(stage)[moment], recipe, killed, *LORA)
    train(recipe, killed, *LORA)
    assert_same_run(undisturbed, killed)


def test_the_rehearsal_passes_with_adapters(recipe):
    result = megarl("doctor", "--recipe", recipe, *LORA)
    assert result.returncode == 0 and "updates, their export and a checkpoint passed" in result.stdout, result.stderr


def test_exported_adapters_added_to_the_base_model_give_the_final_policy(undisturbed, tmp_path):
    command = ("export", undisturbed, "--stage", 1, "--update", 12, "--output")
    succeed(*command, tmp_path / "adapters", "--adapters")
    succeed(*command, tmp_path / "merged")
    assert (tmp_path / "merged" / WEIGHTS).read_bytes() == (undisturbed / "final" / WEIGHTS).read_bytes()
    tensors = load_file(tmp_path / "adapters/adapter_model.safetensors")
    info = read_checked(tmp_path / "adapters/megarl.json", "")
    assert info == {"version": 12, "base_weights_hash": read_info(undisturbed / "stages/000/policy").weights_hash}
    changed = check_peft(undisturbed / "stages/000/policy", tmp_path / "adapters", undisturbed / "final")
    assert changed > len(tensors) / 4  # of the modules, which have two tensors each


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("export", "{run}", "--stage", 1, "--update", 6, "--adapters", "--output", "{new}"), "updates: 10, 12"),
        (("what-if", "{run}", "--stage", 0), "what-if compares gradients of all weights"),
        (("optimize", "{run}", "--stage", 1, "--output", "{new}", "--set", "actor.lora.rank=2"), "optimizer state of"),
        (("train", "{recipe}", "--run-dir", "{new}", "--continue-from", "{run}"), "optimizer is of adapters"),
    ],
)
def test_what_adapters_do_not_support_is_refused_before_a_start(undisturbed, recipe, tmp_path, command, message):
    places = {"run": undisturbed, "new": tmp_path / "new", "recipe": recipe}
    result = megarl(*(str(part).format(**places) for part in command))
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "new/logs").exists()
