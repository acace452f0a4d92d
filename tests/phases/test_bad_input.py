"""Every mistake a person can make: one clear message, a non-zero exit, nothing sealed lost."""

import json
import shutil

import pytest

from tests.phases.conftest import megarl


def fails(result, *words):
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    message = result.stderr[result.stderr.index("megarl: ") :]
    for word in words:
        assert word in message, f"{word!r} not in: {message}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rollout.temperatur=1.0", ["rollout.temperatur", "'temperature'"]),
        ("optimiser.lr=1e-3", ["optimiser", "'optimizer'"]),
        ("schedule.stages=two", ["schedule.stages", "integer", "'two'"]),
        ("schedule.stages=0", ["schedule.stages", "greater than or equal to 1"]),
        ("optimizer.lr=-1.0", ["optimizer.lr", "greater than 0"]),
        ("objective.name=mu_grop", ["mu_grop", "mu_grpo"]),
        ("objective.ratio_mx=5.0", ["ratio_mx", "ratio_max"]),
        ("objective.veto_scope=prefix", ["veto_scope", "prefix", "suffix"]),
        ("objective.veto_threshold=2.0", ["veto_threshold", "2.0"]),
        ("data.train=spell_backwards", ["spell_backwards", "spell_backward"]),
        ("data.prompt_template={wrd}=", ["wrd", "word"]),
        ("data.max_prompt_tokens=1", ["max_prompt_tokens"]),
        ("model.path=/nowhere", ["/nowhere"]),
        ("actor.tensor_parallel=2", ["processes_per_node", "tensor_parallel"]),
        ("actor.backend=cuda", ["no GPU"]),
        ("rollout", ["section.key=value"]),
    ],
)
def test_a_wrong_setting_is_named(recipe, tmp_path, setting, words):
    fails(megarl("train", recipe, "--run-dir", tmp_path / "run", "--set", setting), *words)
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_missing_or_no_toml(tmp_path):
    fails(megarl("train", tmp_path / "none.toml", "--run-dir", tmp_path / "run"), "none.toml")
    (tmp_path / "bad.toml").write_text("[model\npath=")
    fails(megarl("train", tmp_path / "bad.toml", "--run-dir", tmp_path / "run"), "bad.toml", "line 1")


def test_a_tokenizer_that_does_not_fit(recipe, tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = 20
    (model / "config.json").write_text(json.dumps(config))
    fails(megarl("train", recipe, "--run-dir", tmp_path / "run", "--set", f"model.path={model}"), "54", "20")


def test_prompt_files_with_mistakes(recipe, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    settings = ["--set", "data.source=file", "--set", f"data.train={prompts}", "--set", "reward.kind=exact"]
    settings += ["--set", "data.prompt_template={prompt}="]
    command = ["train", recipe, "--run-dir", tmp_path / "run", *settings]
    fails(megarl(*command), "prompts.jsonl")
    prompts.write_text('{"prompt": "ab"}\n')
    fails(megarl(*command), "prompts.jsonl", "answer")
    prompts.write_text('{"prompt": "ab", "answer": "ba"}\n{"prompt": "a')
    fails(megarl(*command), "prompts.jsonl", "line 2")


def test_damage_to_a_run_directory(recipe, tmp_path):
    run = tmp_path / "run"
    command = ["train", recipe, "--run-dir", run]
    result = megarl("rollout", run, "--stage", "0")
    fails(result, "recipe.toml")

    from megarl.config import load_recipe
    from megarl.run_dir import RunDir

    RunDir.create(run, load_recipe(recipe))
    assert megarl("rollout", run, "--stage", "0").returncode == 0
    sealed = {p.name: p.read_bytes() for p in (run / "stages/000/rollouts").iterdir()}

    fails(megarl(*command, "--set", "optimizer.lr=0.5"), "optimizer.lr", "0.001", "0.5")
    fails(megarl("rollout", run, "--stage", "7"), "7")
    fails(megarl("optimize", run, "--stage", "1"), "stages/001/policy")

    shard = next((run / "stages/000/rollouts").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-200] + bytes(200))
    fails(megarl("optimize", run, "--stage", "0"), shard.name)
    shard.write_bytes(sealed[shard.name])

    ledger = run / "stages/000/rollouts/ledger.jsonl"
    ledger.write_bytes(sealed["ledger.jsonl"][:-50])
    fails(megarl("optimize", run, "--stage", "0"), "ledger.jsonl")
    ledger.write_bytes(sealed["ledger.jsonl"])

    result = megarl(*command)
    assert result.returncode == 0, result.stderr
    assert {p.name: p.read_bytes() for p in (run / "stages/000/rollouts").iterdir()} == sealed
