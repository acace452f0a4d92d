"""Statistics over the optimizer batch, whatever the micro-batches; log-probs of policies with fixed weights."""

import pytest
import torch

from megarl.actor import checkpoint
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.packing import micro_batches
from megarl.actor.schedule import collect, run_micro_batches
from megarl.actor.step import train_step
from megarl.batch import TokenBatch
from megarl.objectives import build_objective
from tests.actor.test_step import CPU, build, make_samples, update

pytestmark = pytest.mark.usefixtures("one_rank")
BATCH_LEVEL = [("m2po", {"m2_threshold": 0.3}), ("m2po", {"variant": "released", "m2_threshold": 0.3}), ("bapo", {})]


def make_updates(path, name, fields, budget, scope, updates=1):
    """Metrics of the last of ``updates`` updates, and the actor after it."""
    actor = build(path, actor={"statistics_scope": scope})
    for number in range(updates):
        metrics = update(actor, make_samples(12, seed=number), name, budget, **fields)
    return metrics, actor


@pytest.fixture(scope="module")
def model_dir(saved_model):
    return saved_model("qwen3")


@pytest.mark.parametrize(("name", "fields"), BATCH_LEVEL)
def test_exact_statistics_do_not_depend_on_micro_batches_as_those_of_each_do(model_dir, name, fields):
    whole, _ = make_updates(model_dir, name, fields, 10_000, "exact")
    assert whole["kept_fraction"] < 1
    for budget in (60, 24):
        split, _ = make_updates(model_dir, name, fields, budget, "exact")
        assert split.keys() == whole.keys()
        for key in ("loss", "grad_norm", "kept_fraction", "m2/after", "ess", "ratio/q95"):
            assert split[key] == pytest.approx(whole[key], rel=1e-5), key
    micro, _ = make_updates(model_dir, name, fields, 24, "micro")
    assert micro["loss"] != pytest.approx(whole["loss"], rel=1e-5)


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


def test_frozen_policies_keep_the_log_probs_of_the_beginning(model_dir):
    """The KL to a reference is 0 at first, and then as large as the log-probs have changed; the mismatch between actor
    and engine does not change while the policy does."""
    actor, options = build(model_dir), {"kl": {"coefficient": 0.1}, "truncated_importance": {"maximum": 1e6}}
    actor.frozen = [FrozenPolicy.build((name,), actor.recipe, model_dir) for name in ("ref_logprobs", "old_logprobs")]
    first, second = (update(actor, make_samples(12), "reinforce", 60, **options) for _ in range(2))
    plain = update(build(model_dir), make_samples(12), "reinforce", 60)
    assert abs(first["kl_ref/k3"]) < 1e-9 and second["kl_ref/k3"] > 1e-4
    moved = second["kl/k1"] - first["kl/k1"]  # mean of -(log pi - log pi_rollout)
    assert second["kl_ref/k1"] == pytest.approx(-moved, rel=1e-4)
    assert first["mismatch/mean"] == second["mismatch/mean"]
    assert first["mismatch/mean"] == pytest.approx(plain["ratio/mean"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
