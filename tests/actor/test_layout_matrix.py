"""No layout changes the result: gradient and updates in each, against those of one rank on the same rollouts.

`tests/rehearsal/on_device/test_updates.py` has the same layouts with communication that overlaps with computation.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.actor.layout_ranks import LAYOUTS, MATRIX, MATRIX_CASES, resume_worker, updates_of, worker
from tests.actor.ranks import once, run_ranks
from tests.extent import few

pytestmark = pytest.mark.layouts


@pytest.fixture(scope="module")
def results(model_and_rollouts, tmp_path_factory):
    def compute(folder):
        for ranks in sorted({LAYOUTS[name].ranks for name in MATRIX}):
            run_ranks(worker, (ranks, *model_and_rollouts, folder), ranks)

    folder = once(tmp_path_factory, "layouts", compute)
    return {name: torch.load(folder / f"{name}.pt") for name in MATRIX}


def relative(a, b):
    return abs(a - b) / abs(b)


@pytest.mark.parametrize("case", MATRIX_CASES)
@pytest.mark.parametrize("name", MATRIX[1:])
def test_gradient_and_updates_equal_those_of_one_rank(results, name, case):
    one, other = results["one"][case], results[name][case]
    assert one["gradient"].keys() == other["gradient"].keys()
    difference = sum(float((other["gradient"][k] - g).double().square().sum()) for k, g in one["gradient"].items())
    size = sum(float(g.double().square().sum()) for g in one["gradient"].values())
    gradient = (difference / size) ** 0.5
    losses = [relative(b["loss"], a["loss"]) for a, b in zip(one["metrics"], other["metrics"], strict=False)]
    print(f"\n{name} {case}: gradient {gradient:.1e}, loss of {len(losses)} updates {max(losses):.1e}")
    assert size > 1e-6
    assert gradient < 1e-5
    assert len(losses) == updates_of(name, case)
    assert max(losses) < 1e-3
    for key in one["metrics"][0]:  # every layout counts each token once
        assert other["metrics"][0][key] == pytest.approx(one["metrics"][0][key], rel=1e-4, abs=1e-6), key
    # tokens of each sample; after the samples there may be the filler of an empty micro-batch, which trains nothing
    assert one["tokens"] == other["tokens"] and one["tokens"][-1] == [0, 0]
    assert sum(trained for trained, _ in one["tokens"]) > 0


@pytest.mark.parametrize("name", MATRIX[1:])
def test_log_probs_of_responses_that_share_a_prompt_equal_those_of_whole_sequences(results, name):
    for shared, whole in zip(results[name]["logprobs"], results["one"]["logprobs"], strict=True):
        # four roundings of a float32 of this size in each (top, sum, logarithm, difference), besides the hidden states'
        np.testing.assert_allclose(shared, whole, rtol=4 * np.finfo(np.float32).eps, atol=1e-6)


def test_routing_disagreement_is_zero_at_first_and_half_for_random_experts(results):
    """At first the actor is the policy whose experts it replays. Of random experts, 2 of 4, routers choose half."""
    drift = [m["routing/disagreement"] for m in results["one"]["replay actor"]["metrics"]]
    assert drift[0] == 0 < drift[-1] < 0.2
    assert 0.4 < results["one"]["replay engine"]["metrics"][0]["routing/disagreement"] < 0.6
    assert "routing/disagreement" not in results["one"]["mu_grpo"]["metrics"][0]


@pytest.fixture(scope="module")
def reference_scores(model_and_rollouts):
    """Transformers' log-probs of the sequences that `layout_ranks.reference_scores` scores."""
    model = AutoModelForCausalLM.from_pretrained(model_and_rollouts[0], dtype=torch.float32)
    scores = []
    for k, n in enumerate((2, 9, 30, 61, 17)):
        tokens = torch.tensor([[(7 * i + 3 * k) % 67 for i in range(n)]])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        scores.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy())
    return scores


@pytest.mark.parametrize("name", MATRIX)
def test_reference_log_probs_equal_transformers_in_every_layout(results, reference_scores, name):
    for scores, expected in zip(results[name]["scores"], reference_scores, strict=True):
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MATRIX)
def test_every_layout_names_the_sequence_that_is_not_finite(results, name):
    (one,), (other,) = results["one"]["offenders"], results[name]["offenders"]
    assert one["tensor"] == "rollout_logprobs"
    assert one["positions"] == [len(one["response_tokens"]) - 1]
    assert one["rollout_logprobs"][-1] == "nan"
    assert other["logprobs"] == pytest.approx(one["logprobs"], abs=1e-5)
    assert other | {"logprobs": None} == one | {"logprobs": None}


# layouts of four ranks; each resumes from its own checkpoint and from those of all layouts before it
CONTINUED = few(("TP2 PP2", "DP2 EP2", "CP2 PP2", "TP2 EP4"), "DP2 EP2", "CP2 PP2")


def test_a_checkpoint_resumes_bit_for_bit_in_its_layout_and_closely_in_others(model_and_rollouts, tmp_path):
    run_ranks(resume_worker, (4, CONTINUED, *model_and_rollouts, tmp_path), 4)
    results = torch.load(tmp_path / "results.pt")
    for (source, name), losses in results.items():
        undisturbed = results[source, source]
        assert losses.keys() == undisturbed.keys()
        furthest = max(relative(losses[update], loss) for update, loss in undisturbed.items())
        print(f"\n{source} -> {name}, updates {min(losses)} to 6: {furthest:.1e}")
        assert furthest < 1e-3
        assert furthest == 0 or source != name
    assert len(results) == len(CONTINUED) * (len(CONTINUED) + 1) // 2
