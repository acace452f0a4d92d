"""The same sealed rollouts optimised under other layouts give the same updates, and the same exported policy.

Through the commands; `tests/actor/test_layout_matrix.py` has all layouts.
"""

import functools
import json

import pytest
from safetensors.torch import load_file

from tests.helpers import megarl

pytestmark = pytest.mark.layouts


@pytest.fixture(scope="module")
def sealed(recipe, tmp_path_factory):
    """A run with stage 0 generated and optimised by one process."""
    run = tmp_path_factory.mktemp("run") / "run"
    settings = ["--set", "rollout.workers=2", "--set", "schedule.stages=1", "--set", "eval.every=0"]
    result = megarl("train", recipe, "--run-dir", run, *settings)
    assert result.returncode == 0, result.stderr
    return run


@pytest.fixture(scope="module")
def optimized(sealed, tmp_path_factory):
    """(objective settings, layout settings) -> metrics and weights of the stage optimised with them, made once."""

    @functools.cache
    def optimize(objective, processes, layout):
        branch = tmp_path_factory.mktemp("branch") / "run"
        settings = ("actor.tokens_per_micro_batch=40", f"actor.processes_per_node={processes}", *objective, *layout)
        arguments = [part for setting in settings for part in ("--set", setting)]
        result = megarl("optimize", sealed, "--stage", "0", "--output", branch, *arguments)
        assert result.returncode == 0, result.stderr
        metrics = [json.loads(line) for line in (branch / "metrics.jsonl").read_text().splitlines()]
        weights = {
            n: tensor for file in (branch / "final").glob("*.safetensors") for n, tensor in load_file(file).items()
        }
        return metrics, weights

    return optimize


def test_lagged_statistics_keep_pipeline_stages_in_step(optimized):
    """Only the last stage has statistics, but all must agree whether an extra forward pass is due."""
    lagged = ("objective.name=m2po", "actor.statistics_scope=lagged")
    (one, _), (two, _) = optimized(lagged, 1, ()), optimized(lagged, 2, ("actor.pipeline_parallel=2",))
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("mu_grpo", ("actor.expert_parallel=2",)),
        ("m2po", ("actor.pipeline_parallel=2",)),  # whose statistics meet other ranks
    ],
)
def test_two_processes_make_the_same_updates(optimized, objective, layout):
    name = (f"objective.name={objective}",)
    (one, weights), (two, others) = optimized(name, 1, ()), optimized(name, 2, layout)
    assert [m["update"] for m in one] == [m["update"] for m in two] == list(range(1, 7))
    assert one[0]["grad_norm"] == pytest.approx(two[0]["grad_norm"], rel=1e-5)
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "entropy", "kept_fraction", "ess", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), (a["update"], key)
    assert weights.keys() == others.keys()
    assert max(float((weights[k] - others[k]).abs().max()) for k in weights) < 1e-3


def test_a_run_continues_in_another_layout_but_not_with_another_recipe(recipe, tmp_path):
    from megarl.errors import UserError
    from megarl.recipe.load import load_recipe
    from megarl.storage.run_dir import RunDir

    run = RunDir.create(tmp_path, load_recipe(recipe))
    other = load_recipe(recipe, ["actor.processes_per_node=2", "actor.expert_parallel=2"])
    assert RunDir.create(tmp_path, other).recipe == RunDir.open(tmp_path).recipe == other != run.recipe
    with pytest.raises(UserError, match=r"rollout\.temperature"):
        RunDir.create(tmp_path, load_recipe(recipe, ["rollout.temperature=0.5", "actor.processes_per_node=4"]))
    assert RunDir.open(tmp_path).recipe == other
