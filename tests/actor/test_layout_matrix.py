"""No layout changes the result: gradient and updates in each, against those of one rank on the same rollouts.

`tests/rehearsal/on_device/test_updates.py` has the same layouts with communication that overlaps with computation.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.actor.layout_ranks import CASES, LAYOUTS, MATRIX, SEQUENCES, seal_models, worker
from tests.actor.ranks import run_ranks

pytestmark = pytest.mark.layouts
BIAS = "e_score_correction_bias"
CONTINUED = [name for name, case in CASES.items() if case.continued]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    seal_models(folder)
    for ranks in sorted({LAYOUTS[layout].ranks for case in CASES.values() for layout in case.layouts}):
        run_ranks(worker, (ranks, folder), ranks, timeout=3600)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return {layout: torch.load(folder / f"{layout}.pt") for layout in LAYOUTS if (folder / f"{layout}.pt").exists()}


def squares(tensors):
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


@pytest.mark.parametrize(("name", "layout"), [(n, x) for n, case in CASES.items() for x in case.layouts if x != "one"])
def test_gradient_and_updates_equal_those_of_one_rank(results, name, layout):
    one, other, limit = results["one"][name], results[layout][name], CASES[name].limit
    assert one["gradient"].keys() == other["gradient"].keys()
    trained = {key: gradient for key, gradient in one["gradient"].items() if BIAS not in key}
    size = squares(trained.values())
    gradient = (squares(other["gradient"][key] - g for key, g in trained.items()) / size) ** 0.5
    losses = [abs(b["loss"] / a["loss"] - 1) for a, b in zip(one["metrics"], other["metrics"], strict=True)]
    assert size > 1e-6
    assert gradient < limit
    assert max(losses) < 100 * limit
    assert one["metrics"][0]["loss"] != one["metrics"][1]["loss"]
    for key in one["metrics"][0]:  # every layout counts each token, and each parameter of the gradient's norm, once
        rel = limit if key == "grad_norm" else 1e-4
        assert other["metrics"][0][key] == pytest.approx(one["metrics"][0][key], rel=rel, abs=1e-6), key
    # tokens of each sample; after the samples there may be the filler of an empty micro-batch, which trains nothing
    assert one["tokens"] == other["tokens"] and one["tokens"][-1] == [0, 0]
    assert sum(trained for trained, _ in one["tokens"]) > 0
    if CASES[name].lora:
        assert min(float(tensor.abs().max()) for tensor in one["gradient"].values()) > 1e-5


@pytest.mark.parametrize("layout", MATRIX[1:])
def test_log_probs_of_responses_that_share_a_prompt_equal_those_of_whole_sequences(results, layout):
    shared, whole = (results[name]["mu_grpo"]["logprobs"] for name in (layout, "one"))
    assert shared.keys() == whole.keys() and whole
    # four roundings of a float32 of this size in each (top, sum, logarithm, difference), besides the hidden states'
    rows = [[values[key] for key in whole] for values in (shared, whole)]
    np.testing.assert_allclose(*rows, rtol=4 * np.finfo(np.float32).eps, atol=1e-6)


def test_reference_log_probs_equal_transformers_in_every_layout(results, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "models/qwen3_moe", dtype=torch.float32)
    for k, tokens in enumerate(map(torch.tensor, ([sequence] for sequence in SEQUENCES))):
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        for layout in MATRIX:
            np.testing.assert_allclose(results[layout]["scores"][k], expected, rtol=0, atol=1e-5, err_msg=layout)


@pytest.mark.parametrize("layout", MATRIX)
def test_every_layout_names_the_sequence_that_is_not_finite(results, layout):
    (one,), (other,) = results["one"]["offenders"], results[layout]["offenders"]
    assert one["tensor"] == "rollout_logprobs"
    assert one["positions"] == [len(one["response_tokens"]) - 1]
    assert one["rollout_logprobs"][-1] == "nan"
    assert other["logprobs"] == pytest.approx(one["logprobs"], abs=1e-5)
    assert other | {"logprobs": None} == one | {"logprobs": None}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_checkpoint_goes_from_layout_to_layout(results, name):
    """Each layout loads the weights that the one before it saved, bit for bit, and makes an update, which equals the
    same one without checkpoints. That needs the optimizer's state too. The router's bias never changes."""
    layouts, undisturbed = CASES[name].layouts, results["one"][name]["continued"]
    for before, layout in pairwise(layouts):
        written, (loaded, later) = results[before][name]["continued"][1], results[layout][name]["continued"]
        assert all(torch.equal(loaded[key], tensor) for key, tensor in written.items())
        moved = [key for key in written if key.endswith(("norm.weight", ".a", ".b"))]
        assert moved and all(not torch.equal(loaded[key], later[key]) for key in moved)
        for key in (key for key in written if BIAS in key):
            assert torch.equal(later[key], loaded[key]) and float(loaded[key].abs().max()) > 0.05
    for number, layout in enumerate(layouts[1:], 2):
        expected, before, resumed = undisturbed[number], undisturbed[number - 1], results[layout][name]["continued"][1]
        step, difference = (squares(x[key] - expected[key] for key in expected) for x in (before, resumed))
        assert (difference / step) ** 0.5 < 0.01
