"""A whole run of a gpt-oss whose published experts are quantised (MXFP4): its policies are stored in bfloat16."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from megarl.storage.policies import read_info
from tests.actor.conftest import make_hf_model
from tests.helpers import five_letters, megarl, read_lines, write_guessing_model, write_recipe
from tests.storage.quantised import quantise

WIDTHS = {"vocab_size": 29, "hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.05}


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    shutil.copytree(tiny_model, folder / "random")
    make_hf_model("gpt_oss", **WIDTHS).bfloat16().save_pretrained(folder / "random")
    write_guessing_model(folder / "random", folder / "model")
    quantise(folder / "model")
    recipe = write_recipe(folder, folder / "model", five_letters())
    result = megarl("train", recipe, "--run-dir", folder / "run", "--set", "optimizer.lr=2e-3", "--set", "eval.every=0")
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_engine_and_actor_agree_on_the_converted_weights(run):
    """Both compute in float32, in stage 0 with the same weights; later the engine has those rounded to bfloat16."""
    updates = read_lines(run / "metrics.jsonl")
    first, second = (update for update in updates if update["staleness"] == 0)
    assert first["ratio/q100"] == pytest.approx(1, abs=1e-4)
    assert second["stage"] == 1 and second["ratio/q100"] == pytest.approx(1, abs=0.05)
    assert len(updates) == 12 and any(update["grad_norm"] > 0 for update in updates)


def test_the_published_model_is_evaluated_like_the_first_policy_of_a_run(run, tmp_path):
    """`megarl eval` of the published model, run twice, gives the same responses as of the run's first policy."""
    answers = []
    for model, output in ((run.parent / "model", "a"), (run.parent / "model", "a"), (run / "stages/000/policy", "b")):
        more = ("--recipe", run.parent / "recipe.toml", "--output", tmp_path / output, "--json")
        told = megarl("eval", model, *more, "--set", "model.path=/not/looked/at")
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)[0]["policy"] == str(model)
        shards = sorted((tmp_path / output / "evaluations").rglob("*.arrow"))
        answers.append([path.read_bytes() for path in shards])
    assert answers[0] == answers[1] == answers[2] and answers[0]
    (converted,) = (tmp_path / "a/policies").iterdir()
    assert read_info(converted).weights_hash == read_info(run / "stages/000/policy").weights_hash


def test_policies_are_bfloat16_in_the_layout_of_the_base(run):
    policies = [
        {key: tensor for file in sorted(policy.glob("*.safetensors")) for key, tensor in load_file(file).items()}
        for policy in (run / "stages/000/policy", run / "final")
    ]
    first, last = policies
    assert first.keys() == last.keys() and {tensor.dtype for tensor in last.values()} == {torch.bfloat16}
    assert all(first[key].shape == last[key].shape for key in first)
    moved = {key for key in first if not torch.equal(first[key], last[key])}
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias", "sinks", "router.bias"):
        assert any(key.endswith(name) for key in moved), name
    assert "quantization_config" not in json.loads((run / "final/config.json").read_text())
