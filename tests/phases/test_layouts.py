"""The same sealed rollouts optimised under other layouts give the same updates, and the same exported policy."""

import json

import pytest
from safetensors.torch import load_file

from tests.phases.conftest import megarl

LAYOUTS = {
    "data": {},
    "expert": {"expert_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "tensor": {"tensor_parallel": 2},
}


@pytest.fixture(scope="module")
def sealed(recipe, tmp_path_factory):
    """A run with stage 0 generated and optimised by one process."""
    run = tmp_path_factory.mktemp("run") / "run"
    settings = ["--set", "rollout.workers=2", "--set", "schedule.stages=1", "--set", "eval.every=0"]
    result = megarl("train", recipe, "--run-dir", run, *settings)
    assert result.returncode == 0, result.stderr
    return run


def test_lagged_statistics_keep_pipeline_stages_in_step(sealed, tmp_path):
    """Only the last stage has statistics, but all must agree whether an extra forward pass is due."""
    results = {}
    for name, processes in (("one", 1), ("two", 2)):
        settings = {"objective.name": "m2po", "actor.statistics_scope": "lagged", "actor.tokens_per_micro_batch": 40}
        settings |= {"actor.processes_per_node": processes, "actor.pipeline_parallel": processes}
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        result = megarl("optimize", sealed, "--stage", "0", "--output", tmp_path / name, *arguments, timeout=120)
        assert result.returncode == 0, result.stderr
        results[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(results["one"], results["two"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-6)


def load_weights(policy):
    return {name: tensor for file in policy.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", ["mu_grpo", "m2po"])
def test_two_processes_make_the_same_updates(sealed, tmp_path, layout, objective):
    if objective == "m2po" and layout not in ("data", "pipeline"):
        pytest.skip("statistics meet other ranks only over data and pipeline parallelism")
    results = {}
    for name, processes in (("one", 1), ("two", 2)):
        settings = {"actor.processes_per_node": processes, "objective.name": objective}
        settings |= {"actor.tokens_per_micro_batch": 40}
        settings |= {f"actor.{key}": value for key, value in LAYOUTS[layout].items()} if processes == 2 else {}
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        result = megarl("optimize", sealed, "--stage", "0", "--output", tmp_path / name, *arguments)
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        results[name] = [json.loads(line) for line in lines], load_weights(tmp_path / name / "final")
    (one, weights), (two, others) = results["one"], results["two"]
    assert [m["update"] for m in one] == [m["update"] for m in two] == list(range(1, 7))
    assert one[0]["grad_norm"] == pytest.approx(two[0]["grad_norm"], rel=1e-5)
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "entropy", "kept_fraction", "ess", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), (a["update"], key)
    assert weights.keys() == others.keys()
    assert max(float((weights[k] - others[k]).abs().max()) for k in weights) < 1e-3


def test_a_run_continues_in_another_layout_but_not_with_another_recipe(recipe, tmp_path):
    from megarl.config import load_recipe
    from megarl.errors import UserError
    from megarl.run_dir import RunDir

    run = RunDir.create(tmp_path, load_recipe(recipe))
    other = load_recipe(recipe, ["actor.processes_per_node=2", "actor.expert_parallel=2"])
    assert RunDir.create(tmp_path, other).recipe == RunDir.open(tmp_path).recipe == other != run.recipe
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        RunDir.create(tmp_path, load_recipe(recipe, ["optimizer.lr=0.5", "actor.processes_per_node=4"]))
    assert RunDir.open(tmp_path).recipe == other
