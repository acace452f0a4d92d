"""Packed stages: after unpacking they are optimized to the same bytes, and hostile ones are refused."""

import json
import os
import shutil
import tomllib

import pytest
import tomli_w
from safetensors.torch import load_file, save_file

from megarl.commands.stages.pack import MANIFEST, Manifest, pack
from megarl.commands.stages.unpack import unpack
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.recipe.load import load_recipe, read_tables
from megarl.storage.ledger import LEDGER
from megarl.storage.policies import INDEX_FILE, check_policy, weight_files
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from tests.actor.conftest import make_hf_model
from tests.commands.stages.hostile import ATTACKS, compressed, recipe_with, with_shard
from tests.commands.stages.made_up import agree, fill, make_run, sha, sums
from tests.helpers import megarl, read_lines
from tests.storage.quantised import quantise

LICENCE = "cc-by-4.0"


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """A run with its own copy of the prompt file, which a test can hide."""
    folder = tmp_path_factory.mktemp("travel")
    prompts = shutil.copy(recipe.parent / "prompts.jsonl", folder / "my prompts.jsonl")
    text = recipe.read_text().replace(str(recipe.parent / "prompts.jsonl"), str(prompts))
    (folder / "recipe.toml").write_text(text)
    return make_run(folder / "recipe.toml", folder / "run")


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "stage"
    pack(run.root, 0, folder, LICENCE, weights=False, prompts=True)
    return folder


@pytest.fixture
def copy(packed, tmp_path):
    """A copy of the packed stage that a test may damage: unlike the original it shares no hard links with the run."""
    return shutil.copytree(packed, tmp_path / "copy")


def optimize(*arguments):
    result = megarl("optimize", *arguments)
    assert result.returncode == 0, result.stderr
    return result


def updates(run):
    """The lines of metrics.jsonl, without times."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_lines(run / "metrics.jsonl")]


def test_an_unpacked_stage_is_optimized_to_the_same_bytes(run, tmp_path, guessing_model):
    optimize(run.root, "--stage", 0, "--output", tmp_path / "a", "--set", "objective.name=grpo")
    assert pack(run.root, 0, tmp_path / "stage", LICENCE, weights=False, prompts=True).has_weights is False
    hidden = run.recipe.data.train + ".gone"  # the unpacked stage must not need files of the original run
    os.rename(run.recipe.data.train, hidden)
    try:
        told = megarl("stage", "unpack", tmp_path / "stage", tmp_path / "b", "--model", guessing_model)
        assert told.returncode == 0, told.stderr
        assert "cc-by-4.0" in told.stdout
        optimize(tmp_path / "b", "--stage", 0, "--output", tmp_path / "d", "--set", "objective.name=grpo")
    finally:
        os.rename(hidden, run.recipe.data.train)
    weights = "stages/001/policy/model.safetensors"
    assert sha(tmp_path / "a" / weights) == sha(tmp_path / "d" / weights)
    assert updates(tmp_path / "a") == updates(tmp_path / "d")
    assert sha(tmp_path / "a" / weights) != sha(guessing_model / "model.safetensors")
    found = audit(tmp_path / "b", 0)
    assert found.problems == []


def test_a_later_stage_is_packed_with_its_optimizer_state(run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "run")
    optimize(root, "--stage", 0)
    fill(RunDir.open(root).stage(1))
    assert pack(root, 1, tmp_path / "packed", LICENCE, weights=False, prompts=False).has_weights
    optimize(root, "--stage", 1)
    refused = megarl("stage", "unpack", tmp_path / "packed", tmp_path / "b")
    assert refused.returncode == 2 and "--prompts FILE" in refused.stderr
    unpack(tmp_path / "packed", tmp_path / "b", None, [run.root.parent / "my prompts.jsonl"])
    optimize(tmp_path / "b", "--stage", 1)
    assert sha(root / "final/model.safetensors") == sha(tmp_path / "b/final/model.safetensors")
    assert updates(root)[2:] == updates(tmp_path / "b")


def test_packed_recipe_and_card_contain_no_paths_of_this_machine(packed, run):
    text = (packed / "recipe.toml").read_text() + (packed / "README.md").read_text()
    assert str(run.root.parent) not in text and str(run.recipe.model.path) not in text
    card = (packed / "README.md").read_text()
    manifest = Manifest.parse((packed / MANIFEST).read_bytes(), packed)
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert manifest.weights_hash in card and manifest.files[f"rollouts/{LEDGER}"].sha256 in card
    assert list(manifest.prompts) == [f"{sha(run.root.parent / 'my prompts.jsonl')[:12]}_my_prompts.jsonl"]


def test_unpacking_with_other_weights_is_refused(packed, tiny_model, tmp_path):
    with pytest.raises(UserError, match="other weights"):
        unpack(packed, tmp_path / "b", tiny_model, [])
    assert not (tmp_path / "b").exists()


@pytest.fixture(scope="module")
def quantised(recipe, tmp_path_factory):
    """The folder of a published gpt-oss (MXFP4 experts), a run of it, and its first stage packed without weights."""
    folder = tmp_path_factory.mktemp("quantised")
    shutil.copytree(load_recipe(recipe).model.path, folder / "model")
    make_hf_model("gpt_oss", vocab_size=29, hidden_size=64, intermediate_size=64).save_pretrained(folder / "model")
    quantise(folder / "model", files=2)
    run = make_run(recipe, folder / "run", f"model.path={folder / 'model'}")
    pack(run.root, 0, folder / "packed", LICENCE, weights=False, prompts=True)
    return folder


def test_quantised_weights_are_converted_as_in_a_run(quantised, tmp_path):
    """Weights that are converted already are accepted too, whatever the bytes of their index file."""
    converted = shutil.copytree(quantised / "run/stages/000/policy", tmp_path / "converted")
    (converted / INDEX_FILE).write_text(json.dumps(json.loads((converted / INDEX_FILE).read_text())))
    for model in (quantised / "model", converted):
        run = tmp_path / f"of {model.name}"
        unpack(quantised / "packed", run, model, [])
        policy = run / "stages/000/policy"
        check_policy(policy)
        assert {file.name: sha(file) for file in weight_files(policy)} == {
            file.name: sha(file) for file in weight_files(converted)
        }
        assert not list((run / "packed").glob(".*"))


def test_unpacking_with_other_quantised_weights_is_refused(quantised, tmp_path):
    """Names, sizes and types are those of the run's; one block of an expert differs."""
    other = shutil.copytree(quantised / "model", tmp_path / "other")
    for file in weight_files(other):
        tensors = load_file(file)
        for tensor in (
            tensor for name, tensor in tensors.items() if name.endswith("layers.1.mlp.experts.down_proj_blocks")
        ):
            tensor.view(-1)[-1] ^= 1
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="other weights"):
        unpack(quantised / "packed", tmp_path / "b", other, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_stage_without_weights_can_be_read_but_not_optimized(packed, tmp_path):
    unpack(packed, tmp_path / "b", None, [])
    told = megarl("samples", tmp_path / "b", "--limit", 1, "--json")
    assert json.loads(told.stdout)["prompt"] == 0
    refused = megarl("optimize", tmp_path / "b", "--stage", 0)
    assert refused.returncode == 2 and "safetensors" in refused.stderr


def test_an_unpacked_run_has_only_shards_that_megarl_wrote(run, copy, tmp_path):
    """Whatever form a shard has in the pack: here its buffers are compressed."""
    with_shard(compressed)(copy, tmp_path)
    unpack(copy, tmp_path / "b", None, [])
    for original in run.stage(0).rollouts.glob("*.arrow"):
        packed, rewritten = copy / "rollouts" / original.name, tmp_path / "b/stages/000/rollouts" / original.name
        assert rewritten.read_bytes() == original.read_bytes()
        assert not os.path.samefile(packed, rewritten)
    assert any(sha(path) != sha(run.stage(0).rollouts / path.name) for path in (copy / "rollouts").glob("*.arrow"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_stage_is_refused_in_one_line(attack, copy, tmp_path):
    make, message = ATTACKS[attack]
    source = make(copy, tmp_path)
    before = {path for path in tmp_path.rglob("*") if "copy" not in path.parts}
    with pytest.raises(UserError, match=message) as refused:
        unpack(source, tmp_path / "b", None, [])
    assert "\n" not in str(refused.value).replace("the recipe is wrong:\n", "")
    assert {path for path in tmp_path.rglob("*") if "copy" not in path.parts} == before


def test_settings_that_start_programs_or_call_servers_are_removed(copy, tmp_path):
    tables = tomllib.loads((copy / "recipe.toml").read_text())
    tables["rollout"] |= {"sglang_python": "/tmp/evil", "vllm": {"hf_overrides": {}}, "sglang": {"x": 1}}
    tables["run"] |= {"wandb": True, "mlflow": True}
    tables["reward"]["parts"] = [{"kind": "python", "weight": 1.0, "path": "/tmp/evil.py:f"}]
    (copy / "recipe.toml").unlink()
    (copy / "recipe.toml").write_text(tomli_w.dumps(tables))
    agree(copy)
    unpack(copy, tmp_path / "b", None, [])
    recipe = RunDir.open(tmp_path / "b").recipe
    assert recipe.rollout.sglang_python is None and not recipe.rollout.vllm and not recipe.rollout.sglang
    assert not recipe.run.wandb and not recipe.run.mlflow and not recipe.reward.parts
    assert read_tables(tmp_path / "b/packed/recipe.toml")["run"]["wandb"] is True  # the packed recipe is kept as it was


def test_only_settings_that_leave_the_rollouts_as_they_are_can_be_set(packed, tmp_path):
    unpack(packed, tmp_path / "b", None, [], ["optimizer.lr=1e-3", "rollout.workers=2", "eval.samples=2"])
    recipe = RunDir.open(tmp_path / "b").recipe
    assert (recipe.optimizer.lr, recipe.rollout.workers, recipe.eval.samples) == (1e-3, 2, 2)
    others = ("rollout.temperature=0.5", "schedule.stages=3", "data.train=x", "model.path=/")
    for setting in (*others, "run.seed=7", "eval.prompts=8"):  # the last two change the prompt of a group number
        with pytest.raises(UserError, match="depend on it"):
            unpack(packed, tmp_path / "c", None, [], [setting])
    with pytest.raises(UserError, match="score them again"):
        unpack(packed, tmp_path / "c", None, [], ["reward.require_stop=false"])


def test_a_stage_whose_rollouts_have_held_out_prompts_is_refused(recipe, run, tmp_path):
    tokenizer = load_tokenizer(run.stage(0).policy)
    store = RolloutStore(run.stage(0).rollouts)
    leaked = [tokenizer.decode(group.prompt_tokens).replace(" ", "") for group in store.read(store.group_ids)[:3]]
    exam = tmp_path / "exam.jsonl"
    exam.write_text("".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in ["abcde", *leaked]))
    suite = [f"eval.suite='{exam}'", "eval.prompts=4", "eval.every=1", "data.prompt_template='{prompt}'"]
    make_run(recipe, tmp_path / "run", *suite)
    pack(tmp_path / "run", 0, tmp_path / "packed", LICENCE, weights=False, prompts=True)
    unpack(tmp_path / "packed", tmp_path / "a", None, [], ["eval.every=0"])  # nothing is held out
    with pytest.raises(UserError, match=r"3 of 8 groups have prompts that are held out for evaluation"):
        unpack(tmp_path / "packed", tmp_path / "b", None, [])
    assert not (tmp_path / "b").exists()


def test_settings_that_are_refused_can_be_replaced_with_set(copy, tmp_path):
    recipe_with("reward", kind="judge")(copy, tmp_path)
    recipe_with("megatron", fp8_quantizer_factory="os.system")(copy, tmp_path)
    given = ["reward.kind=exact", "megatron.fp8_quantizer_factory=mine.quantizer"]
    unpack(copy, tmp_path / "b", None, [], given)
    recipe = RunDir.open(tmp_path / "b").recipe
    assert (recipe.reward.kind, recipe.megatron["fp8_quantizer_factory"]) == ("exact", "mine.quantizer")


def test_files_of_a_policy_must_be_regular_and_in_its_directory(run, tmp_path):
    policy = shutil.copytree(run.stage(0).policy, tmp_path / "policy")
    (policy / "config.json").unlink()
    os.mkfifo(policy / "config.json")
    with pytest.raises(UserError, match=r"config\.json is not a regular file"):
        check_policy(policy)
    shutil.copy(policy / "model.safetensors", tmp_path)
    (policy / INDEX_FILE).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(UserError, match="not the name of a file in the same directory"):
        weight_files(policy)


def test_a_damaged_run_is_not_packed(run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "run")
    path = next((root / "stages/000/rollouts").glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="does not match the checksum"):
        pack(root, 0, tmp_path / "stage", LICENCE, weights=True, prompts=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_helper_sums_gives_the_manifest_of_an_unchanged_pack(packed):
    assert sums(packed) == Manifest.parse((packed / MANIFEST).read_bytes(), packed)
