"""Packed stages are optimized to the same bytes, and hostile ones are refused; branches."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from megarl.commands.one_phase import branch, changed_recipe
from megarl.commands.stages.pack import MANIFEST, pack
from megarl.commands.stages.unpack import unpack
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.storage.policies import INDEX_FILE, copy_policy, weight_files
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from tests.commands.stages.hostile import ATTACKS, with_recipe
from tests.commands.stages.made_up import fill, make_run, sha
from tests.faults.__main__ import flip
from tests.helpers import read_lines
from tests.phases.commands import succeed
from tests.storage.sample_rollouts import as_bytes

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
    pack(run.root, 0, folder, LICENCE, weights=False)
    return folder


@pytest.fixture
def copy(packed, tmp_path):
    """A copy of the packed stage that a test may damage."""
    return shutil.copytree(packed, tmp_path / "copy")


def updates(run):
    """The lines of metrics.jsonl, without times."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_lines(run / "metrics.jsonl")]


def test_an_unpacked_stage_is_optimized_to_the_same_bytes(run, tmp_path, guessing_model):
    succeed("optimize", run.root, "--stage", 0, "--output", tmp_path / "a", "--set", "objective.name=grpo")
    assert pack(run.root, 0, tmp_path / "stage", LICENCE, weights=False).has_weights is False
    text = (tmp_path / "stage" / MANIFEST).read_text() + (tmp_path / "stage/README.md").read_text()
    assert str(run.root.parent) not in text and str(run.recipe.model.path) not in text
    (tmp_path / "stage/.gitattributes").write_text("of a download")
    hidden = run.recipe.data.train + ".gone"  # the unpacked stage must not need files of the original run
    os.rename(run.recipe.data.train, hidden)
    try:
        told = succeed("stage", "unpack", tmp_path / "stage", tmp_path / "b", "--model", guessing_model)
        assert "cc-by-4.0" in told.stdout
        succeed("optimize", tmp_path / "b", "--stage", 0, "--output", tmp_path / "d", "--set", "objective.name=grpo")
    finally:
        os.rename(hidden, run.recipe.data.train)
    weights = "stages/001/policy/model.safetensors"
    assert sha(tmp_path / "a" / weights) == sha(tmp_path / "d" / weights)
    assert updates(tmp_path / "a") == updates(tmp_path / "d")
    assert sha(tmp_path / "a" / weights) != sha(guessing_model / "model.safetensors")
    assert audit(tmp_path / "b", 0).problems == []
    for shard in run.stage(0).rollouts.glob("*.arrow"):
        assert (tmp_path / "b/stages/000/rollouts" / shard.name).read_bytes() == shard.read_bytes()


def test_a_later_stage_becomes_the_first_of_a_run(run, tiny_model, tmp_path):
    """With its policy as the model, here the untrained one, and a new optimizer, whose state is never packed."""
    root = shutil.copytree(run.root, tmp_path / "run")
    stage = RunDir.open(root).stage(1)
    copy_policy(tiny_model, tiny_model, stage.policy, version=stage.first_update)
    fill(stage)
    manifest = pack(root, 1, tmp_path / "packed", LICENCE, weights=False)
    assert manifest.has_weights
    unpack(tmp_path / "packed", tmp_path / "b")
    first = RunDir.open(tmp_path / "b").stage(0)
    assert sha(first.policy / "model.safetensors") == sha(stage.policy / "model.safetensors")
    before, after = (RolloutStore(each.rollouts).read(each.groups) for each in (stage, first))
    for ours, theirs in zip(before, after, strict=True):
        responses = tuple(replace(response, policy_version=0) for response in ours.responses)
        assert as_bytes(theirs) == as_bytes(replace(ours, group_id=theirs.group_id, responses=responses))
    succeed("optimize", tmp_path / "b", "--stage", 0)
    assert audit(tmp_path / "b", 0).problems == []


def test_a_stage_without_weights_can_be_read_but_not_optimized(packed, tmp_path):
    unpack(packed, tmp_path / "b")
    assert json.loads(succeed("samples", tmp_path / "b", "--limit", 1, "--json").stdout)["prompt"] == 0
    assert "safetensors" in succeed("optimize", tmp_path / "b", "--stage", 0, code=2).stderr


def test_only_the_groups_that_a_stage_trains_are_packed(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "rollout.oversample=2", chosen=[1, 2, 3, 5, 6, 9, 12, 15])
    pack(run.root, 0, tmp_path / "packed", LICENCE, weights=False)
    unpack(tmp_path / "packed", tmp_path / "b")
    ours, theirs = (RolloutStore(each.stage(0).rollouts) for each in (run, RunDir.open(tmp_path / "b")))
    assert theirs.group_ids == list(theirs.chosen) == list(ours.chosen)
    for one, other in zip(ours.read(ours.chosen), theirs.read(ours.chosen), strict=True):
        assert one.prompt_tokens.tolist() == other.prompt_tokens.tolist()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_stage_is_refused_in_one_line(attack, copy, tmp_path):
    make, message = ATTACKS[attack]
    make(copy)
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as refused:
        unpack(copy, tmp_path / "b")
    assert "\n" not in str(refused.value).replace("the recipe is wrong:\n", "")
    assert set(tmp_path.iterdir()) == before


def test_settings_that_start_programs_or_call_servers_are_removed(copy, tmp_path):
    with_recipe("rollout", sglang_python="/tmp/evil", vllm={"hf_overrides": {}}, sglang={"x": 1})(copy)
    with_recipe("run", wandb=True, mlflow=True)(copy)
    with_recipe("reward", parts=[{"kind": "python", "weight": 1.0, "path": "/tmp/evil.py:f"}])(copy)
    with_recipe("objective", path="/tmp/evil.py:F")(copy)
    unpack(copy, tmp_path / "b")
    recipe = RunDir.open(tmp_path / "b").recipe
    assert recipe.rollout.sglang_python is None and not recipe.rollout.vllm and not recipe.rollout.sglang
    assert not recipe.run.wandb and not recipe.run.mlflow and not recipe.reward.parts and not recipe.objective.path


def test_only_settings_that_leave_the_rollouts_as_they_are_can_be_set(packed, tmp_path):
    unpack(packed, tmp_path / "b", None, ["optimizer.lr=1e-3", "rollout.workers=2", "eval.samples=2"])
    recipe = RunDir.open(tmp_path / "b").recipe
    assert (recipe.optimizer.lr, recipe.rollout.workers, recipe.eval.samples) == (1e-3, 2, 2)
    others = ("rollout.temperature=0.5", "schedule.stages=3", "data.train=x", "model.path=/")
    for setting in (*others, "run.seed=7", "eval.prompts=8"):  # the last two change the prompt of a group number
        with pytest.raises(UserError, match="depend on it"):
            unpack(packed, tmp_path / "c", None, [setting])
    with pytest.raises(UserError, match="score them again"):
        unpack(packed, tmp_path / "c", None, ["reward.require_stop=false"])


def test_a_stage_whose_rollouts_have_held_out_prompts_is_refused(recipe, run, tmp_path):
    tokenizer = load_tokenizer(run.stage(0).policy)
    store = RolloutStore(run.stage(0).rollouts)
    leaked = [tokenizer.decode(group.prompt_tokens).replace(" ", "") for group in store.read(store.group_ids)[:3]]
    exam = tmp_path / "exam.jsonl"
    exam.write_text("".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in ["abcde", *leaked]))
    suite = [f"eval.suite='{exam}'", "eval.prompts=4", "eval.every=1", "data.prompt_template='{prompt}'"]
    make_run(recipe, tmp_path / "run", *suite)
    pack(tmp_path / "run", 0, tmp_path / "packed", LICENCE, weights=False)
    unpack(tmp_path / "packed", tmp_path / "a", None, ["eval.every=0"])  # nothing is held out
    with pytest.raises(UserError, match=r"3 of 8 groups have prompts that are held out for evaluation"):
        unpack(tmp_path / "packed", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_settings_that_are_refused_can_be_replaced_with_set(copy, tmp_path):
    with_recipe("reward", kind="judge")(copy)
    with_recipe("megatron", fp8_quantizer_factory="os.system")(copy)
    with_recipe("objective", name="theirs.py:Own", theirs=1)(copy)
    given = ["reward.kind=exact", "objective.name=grpo", "megatron.fp8_quantizer_factory=mine.quantizer"]
    unpack(copy, tmp_path / "b", None, given)
    recipe = RunDir.open(tmp_path / "b").recipe
    assert (recipe.reward.kind, recipe.megatron["fp8_quantizer_factory"]) == ("exact", "mine.quantizer")


def test_weights_are_in_the_directory_of_their_index(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / INDEX_FILE).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(UserError, match="not the name of a file in the same directory"):
        weight_files(tmp_path / "policy")


@pytest.mark.parametrize("name", ["rollouts/*.arrow", "policy/config.json"])
def test_a_damaged_stage_is_not_packed(name, run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "run")
    flip(next((root / "stages/000").glob(name)))
    with pytest.raises(UserError, match="does not match (the|its) checksum"):
        pack(root, 0, tmp_path / "stage", LICENCE, weights=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_stage_with_a_token_budget_is_neither_packed_nor_scored_again(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", "rollout.token_budget=2", "rollout.oversample=2")
    with pytest.raises(UserError, match="trains groups that earlier stages began"):
        pack(run.root, 0, tmp_path / "stage", "apache-2.0", weights=False)
    assert not (tmp_path / "stage").exists()
    with pytest.raises(UserError, match="--set reward: not with rollout.token_budget"):
        changed_recipe(run.stage(0), ["reward.require_stop=false"])
    assert changed_recipe(run.stage(0), ["optimizer.lr=1e-3"]).optimizer.lr == 1e-3


def test_the_optimizer_state_of_another_run_goes_into_branches(recipe, tmp_path):
    run, checkpoint = make_run(recipe, tmp_path / "run"), tmp_path / "other/update_000002"
    checkpoint.mkdir(parents=True)
    run.start_from(checkpoint)
    made = branch(run.stage(0), tmp_path / "branch", changed_recipe(run.stage(0), ["optimizer.lr=1e-3"]))
    assert made.run.start() == checkpoint
    checkpoint.rmdir()
    with pytest.raises(UserError, match="put it back"):
        made.run.start()
