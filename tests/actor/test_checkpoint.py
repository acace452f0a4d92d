"""A resumed run goes on bit for bit."""

import pytest
import torch

from megarl.objectives import build_objective
from tests.actor.conftest import make_hf_model
from tests.actor.test_step import CPU, build, make_samples

pytestmark = pytest.mark.usefixtures("one_rank")


def updates(actor, numbers):
    from megarl.actor.packing import micro_batches
    from megarl.actor.step import train_step

    objective = build_objective("mu_grpo", {})
    return [train_step(actor, micro_batches(make_samples(seed=n), 64, CPU), objective, lr=1e-2) for n in numbers]


def weights(actor):
    return [p.detach().clone() for model in actor.models for p in model.parameters()]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_tied"])
def test_resume_is_bitwise(family, tmp_path):
    from megarl.actor import checkpoint

    make_hf_model(family).save_pretrained(tmp_path / "model")
    straight = build(tmp_path / "model")
    updates(straight, range(3))
    checkpoint.save(straight, tmp_path / "checkpoints", 3, keep=2)
    expected = updates(straight, range(3, 6))

    resumed = build(tmp_path / "model")
    (found,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert checkpoint.load(resumed, found[1]) == 3 == found[0]
    assert updates(resumed, range(3, 6)) == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))


def test_only_complete_and_newest_checkpoints_stay(tmp_path):
    from megarl.actor import checkpoint

    make_hf_model("qwen3").save_pretrained(tmp_path / "model")
    actor, directory = build(tmp_path / "model"), tmp_path / "checkpoints"
    (directory / ".update_000004.9-9.tmp").mkdir(parents=True)  # a killed save
    (directory / ".update_000004.9-9.tmp/rest").write_text("torn")
    for update in (2, 4, 6):
        checkpoint.save(actor, directory, update, keep=2)
    assert [u for u, _ in checkpoint.checkpoints(directory)] == [4, 6]
    assert sorted(p.name for p in directory.iterdir()) == ["update_000004", "update_000006"]
    assert not (directory / "update_000004/rest").exists()
