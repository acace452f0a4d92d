"""Statistics over the optimizer batch, whatever the micro-batches; log-probs of policies with fixed weights."""

import numpy as np
import pytest
import torch

from megarl.actor import checkpoint
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.packing import micro_batches
from megarl.actor.schedule import collect, run_micro_batches
from megarl.actor.step import train_step
from megarl.batch import TokenBatch
from megarl.objectives import build_objective
from tests.actor.conftest import make_hf_model
from tests.actor.test_step import CPU, build, make_samples

pytestmark = pytest.mark.usefixtures("one_rank")
BATCH_LEVEL = [("m2po", {"m2_threshold": 0.3}), ("m2po", {"variant": "released", "m2_threshold": 0.3}), ("bapo", {})]


def make_updates(path, name, fields, budget, scope, updates=1, seed=0):
    """Metrics of the last of ``updates`` updates, and the actor after it."""
    actor, objective = build(path, actor={"statistics_scope": scope}), build_objective(name, fields)
    for update in range(updates):
        batches = micro_batches(make_samples(12, seed=seed + update), budget, CPU)
        metrics = train_step(actor, batches, objective, lr=1e-2)
    return metrics, actor


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_hf_model("qwen3").save_pretrained(path)
    return path


@pytest.mark.parametrize(("name", "fields"), BATCH_LEVEL)
def test_exact_statistics_do_not_depend_on_micro_batches(model_dir, name, fields):
    whole, _ = make_updates(model_dir, name, fields, 10_000, "exact")
    assert whole["kept_fraction"] < 1
    for budget in (60, 24):
        split, _ = make_updates(model_dir, name, fields, budget, "exact")
        assert split.keys() == whole.keys()
        for key in ("loss", "grad_norm", "kept_fraction", "m2/after", "ess", "ratio/q95"):
            assert split[key] == pytest.approx(whole[key], rel=1e-5), key


@pytest.mark.parametrize(("name", "fields"), BATCH_LEVEL)
def test_micro_statistics_depend_on_micro_batches(model_dir, name, fields):
    whole, _ = make_updates(model_dir, name, fields, 10_000, "micro")
    split, _ = make_updates(model_dir, name, fields, 24, "micro")
    assert split["loss"] != pytest.approx(whole["loss"], rel=1e-5)


def test_lagged_statistics_are_those_of_the_update_before_and_survive_a_checkpoint(model_dir, tmp_path, monkeypatch):
    name, fields = BATCH_LEVEL[0]
    _, exact = make_updates(model_dir, name, fields, 24, "exact")
    _, lagged = make_updates(model_dir, name, fields, 24, "lagged")
    same = zip(exact.models[0].parameters(), lagged.models[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)  # no update before the first: it takes exact ones
    assert exact.lagged is None
    objective = build_objective(name, fields)
    batches = micro_batches(make_samples(12), 24, CPU)
    logs = run_micro_batches(build(model_dir).replicas, batches, collect, forward_only=True)
    first = objective.statistics(TokenBatch.concatenate([log.batch for log in logs]))
    assert torch.equal(lagged.lagged.threshold, first.threshold)

    checkpoint.save(lagged, tmp_path, 1, keep=1)
    resumed = build(model_dir, actor={"statistics_scope": "lagged"}, objective={"name": name})
    checkpoint.load(resumed, tmp_path / "update_000001")
    changed = build(model_dir, actor={"statistics_scope": "lagged"}, objective={"name": "bapo"})
    checkpoint.load(changed, tmp_path / "update_000001")
    assert changed.lagged is None  # M2PO's statistics are of no use to it
    assert torch.equal(resumed.lagged.threshold, lagged.lagged.threshold)
    batches = micro_batches(make_samples(12, seed=1), 24, CPU)
    second = train_step(lagged, batches, objective, 1e-2)
    assert train_step(resumed, batches, objective, 1e-2) == second
    assert not torch.equal(lagged.lagged.threshold, first.threshold)
    other, _ = make_updates(model_dir, name, fields, 24, "exact", updates=2)
    assert second["kept_fraction"] != other["kept_fraction"]
    monkeypatch.setattr(type(objective), "statistics", lambda *_: first)
    assert train_step(exact, batches, objective, 1e-2) == second


def test_kl_to_a_frozen_reference(model_dir, tmp_path):
    """It is 0 while the policy is the reference, and then positive, by as much as the log-probs have changed."""
    objective = build_objective("reinforce", {"kl": {"coefficient": 0.1}})
    actor = build(model_dir)
    actor.frozen = [FrozenPolicy.build(("ref_logprobs",), actor.recipe, model_dir)]
    samples = make_samples(12)
    batches = micro_batches(samples, 60, CPU)
    first = train_step(actor, batches, objective, lr=1e-2)
    assert abs(first["kl_ref/k3"]) < 1e-9
    second = train_step(actor, batches, objective, lr=1e-2)
    moved = second["kl/k1"] - first["kl/k1"]  # mean of -(log pi - log pi_rollout)
    assert second["kl_ref/k1"] == pytest.approx(-moved, rel=1e-4)
    assert second["kl_ref/k3"] > 1e-4


def test_truncated_importance_uses_the_actors_log_probs_of_the_behaviour_policy(model_dir):
    objective = build_objective("reinforce", {"truncated_importance": {"maximum": 1e6}})
    actor = build(model_dir)
    actor.frozen = [FrozenPolicy.build(("old_logprobs",), actor.recipe, model_dir)]
    batches = micro_batches(make_samples(12), 60, CPU)
    plain = train_step(build(model_dir), batches, build_objective("reinforce", {}), lr=1e-2)
    results = [train_step(actor, batches, objective, lr=1e-2) for _ in range(3)]
    # the mismatch between actor and engine does not change while the policy does
    assert np.ptp([r["mismatch/mean"] for r in results]) == 0
    assert results[0]["mismatch/mean"] == pytest.approx(plain["ratio/mean"], rel=1e-6)
    assert results[0]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
