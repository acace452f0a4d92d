"""Log-probs of policies with fixed weights."""

import pytest

from megarl.actor.frozen import FrozenPolicy
from tests.actor.test_step import build, make_samples, update

pytestmark = pytest.mark.usefixtures("one_rank")


def test_frozen_policies_keep_the_log_probs_of_the_beginning(saved_model):
    """The KL to a reference is 0 at first, and then as large as the log-probs have changed; the mismatch between actor
    and engine does not change while the policy does."""
    model_dir = saved_model("qwen3")
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
