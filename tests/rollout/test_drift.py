"""The weight-drift check on the built-in engine: an export of the actor passes, changed weights and NaN do not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import UserError
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.drift import check_weights, hugging_face_reference
from megarl.storage.reference_logprobs import Reference, read_reference, write_reference
from tests.rollout.tiny_models import save


@pytest.fixture(scope="module")
def reference(moe_dir):
    return hugging_face_reference(moe_dir)


def test_scores_are_log_probs_at_temperature_one(moe_dir, reference):
    engine = BuiltinEngine(moe_dir, 0)
    model = engine._model
    for tokens, scores in zip(reference.sequences, engine.score(reference.sequences), strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    drift = check_weights(engine, reference)
    assert drift.max < 1e-5 and drift.tokens == 4 * 47 and drift.precision == "float32"


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.experts.3.down_proj.weight"])
def test_one_changed_tensor_is_enough(moe_dir, reference, tmp_path, name):
    path = save(tmp_path / "policy")
    state = load_file(path / "model.safetensors")
    state[name] = state[name] * 1.01
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights are not the policy's: .* of 188 fixed tokens are .* nats off"):
        check_weights(BuiltinEngine(path, 0), reference)


def test_the_tolerance_is_of_the_coarser_precision_and_nan_fails(moe_dir, reference):
    engine = BuiltinEngine(moe_dir, 0)
    off = [scores + np.float32(2e-4) for scores in reference.logprobs]
    with pytest.raises(UserError, match=r"0.0002 nats off in the mean .* float32 allows 0.0001"):
        check_weights(engine, replace(reference, logprobs=off))
    assert check_weights(engine, replace(reference, logprobs=off, precision="bfloat16")).precision == "bfloat16"
    undefined = [np.full_like(scores, np.nan) for scores in reference.logprobs]
    with pytest.raises(UserError, match="nan nats"):
        check_weights(engine, replace(reference, logprobs=undefined, precision="bfloat16"))


def test_a_reference_survives_its_file(tmp_path, reference):
    write_reference(tmp_path, reference)
    again = read_reference(tmp_path)
    assert isinstance(again, Reference)
    assert again.sequences == reference.sequences and again.precision == reference.precision
    assert [a.tobytes() for a in again.logprobs] == [b.tobytes() for b in reference.logprobs]
    (tmp_path / "reference.json").write_text("{")
    with pytest.raises(UserError, match=r"reference.json is damaged"):
        read_reference(tmp_path)
