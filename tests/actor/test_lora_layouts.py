"""Adapters are sharded like their matrices: no layout changes their gradient, its norm, or the exported policy."""

import pytest
import torch

from tests.actor.conftest import make_hf_model
from tests.actor.layout_ranks import seal_rollouts
from tests.actor.lora_ranks import CASES, CHANGES, EVERY, FAMILY, worker
from tests.actor.ranks import once, run_ranks

pytestmark = pytest.mark.layouts


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    def compute(folder):
        model = make_hf_model(FAMILY, initializer_range=0.1, **CHANGES)
        model.save_pretrained(folder / "model")
        seal_rollouts(model, folder / "rollouts", updates=2)
        for ranks in (1, 2):
            run_ranks(worker, (ranks, folder / "model", folder / "rollouts", folder), ranks)

    folder = once(tmp_path_factory, "lora_layouts", compute)
    return {layout: torch.load(folder / f"{layout}.pt") for layout in EVERY}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", EVERY[1:])
def test_gradient_and_policy_equal_those_of_one_rank(results, layout, case):
    one, other = results["one"][case], results[layout][case]
    assert one["begun"].keys() == other["begun"].keys()
    for key, tensor in one["begun"].items():
        assert torch.equal(other["begun"][key], tensor), key
    size = sum(float(tensor.double().square().sum()) for tensor in one["gradient"].values())
    assert min(float(tensor.abs().max()) for tensor in one["gradient"].values()) > 1e-5  # A's too: B is not 0 any more
    for key, tensor in one["gradient"].items():
        furthest = float((other["gradient"][key] - tensor).norm())
        assert furthest < 1e-6 * size**0.5, (key, furthest / size**0.5)
    assert other["norm"] == pytest.approx(one["norm"], rel=1e-5)
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    for key, tensor in one["policy"].items():
        assert float((other["policy"][key] - tensor).abs().max()) < 1e-5, key
