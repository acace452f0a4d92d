"""No layout changes what the layers of a model family compute, such as latent attention or shared experts."""

from itertools import pairwise

import pytest
import torch

from tests.actor.conftest import make_hf_model
from tests.actor.family_ranks import CONTINUED, EVERY, FAMILIES, TRAINED, worker
from tests.actor.layout_ranks import seal_rollouts
from tests.actor.ranks import once, run_ranks

pytestmark = pytest.mark.layouts

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    def compute(folder):
        for name in TRAINED:
            model = make_hf_model(name, num_hidden_layers=3, initializer_range=0.1)
            model.save_pretrained(folder / "models" / name)
        seal_rollouts(model, folder / "rollouts", updates=2)
        for ranks in (1, 2):
            run_ranks(worker, (ranks, folder / "models", folder / "rollouts", folder), ranks)

    folder = once(tmp_path_factory, "family_layouts", compute)
    return {key: value for layout in EVERY for key, value in torch.load(folder / f"{layout}.pt").items()}


CASES = [(name, layout) for name in TRAINED for layout in FAMILIES[name] if layout != "one"]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradient_and_losses_equal_those_of_one_rank(results, name, layout):
    one, other = results[name, "one"], results[name, layout]
    assert one["gradient"].keys() == other["gradient"].keys()
    trained = [key for key in one["gradient"] if BIAS not in key]
    size = sum(float(one["gradient"][key].double().square().sum()) for key in trained)
    assert size > 1e-6
    difference = sum(float((other["gradient"][k] - one["gradient"][k]).double().square().sum()) for k in trained)
    furthest = max(abs(b - a) / abs(a) for a, b in zip(one["losses"], other["losses"], strict=True))
    print(f"\n{name} {layout}: gradient {(difference / size) ** 0.5:.1e}, loss of 2 updates {furthest:.1e}")
    assert (difference / size) ** 0.5 < 1e-6
    assert furthest < 1e-4
    # the norm counts every parameter once, whichever ranks hold it; the second update begins with other roundings
    assert other["norms"] == [pytest.approx(one["norms"][0], rel=1e-6), pytest.approx(one["norms"][1], rel=1e-4)]
    assert one["losses"][0] != one["losses"][1]


@pytest.mark.parametrize("name", CONTINUED)
def test_weights_go_from_layout_to_layout_in_a_checkpoint(results, name):
    """Each layout loads the weights that the one before it saved, bit for bit, and makes an update."""
    pairs = [results[name, layout]["continued"][:2] for layout in FAMILIES[name]]
    for (_, written), (loaded, later) in pairwise(pairs):
        assert all(torch.equal(loaded[key], written[key]) for key in written)
        assert all(not torch.equal(loaded[key], later[key]) for key in written if key.endswith("norm.weight"))


@pytest.mark.parametrize("name", CONTINUED)
def test_updates_from_a_checkpoint_of_another_layout_equal_those_without_one(results, name):
    """That they do needs the optimizer's state too."""
    undisturbed = results[name, "one"]["continued"]
    for number, layout in enumerate(FAMILIES[name][1:], 2):
        expected, before, resumed = undisturbed[number], undisturbed[number - 1], results[name, layout]["continued"][1]
        step, difference = (
            sum(float((x[key] - expected[key]).double().square().sum()) for key in expected) for x in (before, resumed)
        )
        print(f"\n{name} {layout}, update {number}: {(difference / step) ** 0.5:.1e} of its step")
        assert (difference / step) ** 0.5 < 0.01


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_updates_leave_the_bias_of_the_router_unchanged(results, name):
    for layout in FAMILIES[name]:
        biases = {key: value for key, value in results[name, layout]["continued"][1].items() if BIAS in key}
        assert len(biases) == 2  # one for each layer with experts
        for key, bias in biases.items():
            before = results[name, "one"]["gradient"][key]  # a buffer, which `whole_gradient` exports as it is
            assert torch.equal(bias, before) and float(before.abs().max()) > 0.05
