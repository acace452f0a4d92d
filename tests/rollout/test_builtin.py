"""The built-in engine's own behaviour: its random numbers, its states, damaged policies."""

import gc
import json
import os
import shutil
import weakref

import numpy as np
import pytest
import torch

from megarl.errors import UserError
from megarl.rollout.builtin import BuiltinEngine, _Decoder
from megarl.rollout.engine import Request
from tests.rollout.engines import PROMPTS, generate, hugging_face, hugging_face_logprobs, sampling
from tests.rollout.tiny_models import changed, save

STOP = (1, 6, 17)


@pytest.mark.parametrize("family", ["mistral", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gpt_oss"])
def test_sliding_windows_and_recurrent_states_are_kept_while_decoding(tmp_path, family):
    path = save(tmp_path, family, spread=0.2 if family == "mistral" else 0.1)
    table = generate(BuiltinEngine(path, 3), PROMPTS, sampling(PROMPTS, stop=STOP))
    assert sorted(table) == [(i, k) for i in range(len(PROMPTS)) for k in range(3)]
    for (i, _), c in table.items():
        expected = hugging_face_logprobs(path, PROMPTS[i], c.tokens)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=1e-5)
    (i, _), c = max(table.items(), key=lambda item: len(PROMPTS[item[0][0]]))
    kept, lost = (hugging_face_logprobs(path, prompt, c.tokens) for prompt in (PROMPTS[i], PROMPTS[i][4:]))
    assert np.abs(kept - lost).max() > 1e-3  # so a cache without the first tokens is noticed


def test_tokens_are_the_inverse_cdf_at_the_philox_numbers_of_the_seed(moe_dir):
    request = sampling(PROMPTS[:2], samples=2, tokens=84, seed=5, temperature=0.7)
    table = generate(BuiltinEngine(moe_dir, 0), PROMPTS[:2], request)
    for (i, k), c in table.items():
        uniforms = np.random.Generator(np.random.Philox(key=request.seeds[2 * i + k])).random(len(c.tokens))
        cdf = hugging_face(moe_dir, PROMPTS[i], c.tokens, 0.7).double().exp().cumsum(-1).numpy()
        expected = [int(np.searchsorted(row, u * row[-1], side="right")) for row, u in zip(cdf, uniforms, strict=True)]
        assert c.tokens.tolist() == expected


def test_a_prompt_is_computed_once_for_its_group_and_no_response_after_its_end(moe_dir):
    engine, computed = BuiltinEngine(moe_dir, 0), []
    engine._model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    table = generate(engine, PROMPTS, sampling(PROMPTS, samples=20, stop=(4, 30)))
    assert len({len(c.tokens) for c in table.values()}) > 5
    assert sum(computed) == sum(map(len, PROMPTS)) + sum(len(c.tokens) - 1 for c in table.values())


def test_a_token_of_probability_zero_is_never_sampled(moe_dir):
    decoder = _Decoder(BuiltinEngine(moe_dir, 0)._model, Request([[1]], sampling([[1]])), 0)
    decoder.logits = torch.randn(2000, 39, generator=torch.Generator().manual_seed(0))
    decoder.logits[:, :5] = decoder.logits[:, 35:] = float("-inf")
    # the extreme uniform numbers, with sums of probabilities that round to slightly below or above 1
    for uniform, token in ((0.0, 5), (np.nextafter(1.0, 0.0), 34)):
        tokens, _, _ = decoder.sample(np.full(2000, uniform))
        assert set(tokens.tolist()) == {token}


def test_sleep_frees_the_weights(moe_dir):
    engine = BuiltinEngine(moe_dir, 0)
    weights = weakref.ref(next(engine._model.parameters()))
    engine.sleep()
    gc.collect()
    assert weights() is None


def tensors(change):
    return lambda path: changed(path, change)


def config(**settings):
    def damage(path):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return damage


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "cannot load the policy"),
        (lambda path: (path / "config.json").write_text("{"), "cannot load the policy"),
        (lambda path: (path / "model.safetensors").unlink(), "cannot load the policy.*model.safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 9999), "cannot load the policy.*not fully covered"),
        (tensors(lambda state: state.pop("lm_head.weight")), "missing_keys lm_head.weight"),
        (tensors(lambda state: state.pop(EXPERT)), "cannot load the policy.*conversion"),
        (tensors(lambda state: state.update(stray=torch.zeros(3))), "unexpected_keys stray"),
        (tensors(lambda state: state.update({"lm_head.weight": torch.zeros(40, 64)})), "mismatched_keys .*lm_head"),
        (config(model_type="nonesuch"), "cannot load the policy.*nonesuch"),
        (config(model_type="x", auto_map={"AutoConfig": "code.C"}), "cannot load the policy.*custom code"),
    ],
)
def test_a_damaged_policy_directory_is_refused_with_its_damage(moe_dir, tmp_path, damage, message):
    """transformers would fill in missing weights at random."""
    damage(path := shutil.copytree(moe_dir, tmp_path / "policy"))
    with pytest.raises(UserError, match=f"(?s){message}"):
        BuiltinEngine(path, 0)
