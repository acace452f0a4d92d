"""Hugging Face import and export: same logits as transformers, same bytes after a round trip."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import UserError
from tests.actor.conftest import FAMILIES, make_hf_model, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")


def load_models(path, **actor):
    from megarl.actor.hf import load_hf
    from megarl.actor.model import build_model
    from megarl.hf_config import read_hf_config

    models = build_model(read_hf_config(path), make_recipe(path, actor={"backend": "cpu", **actor}))
    load_hf(models, path)
    return models


def packed_logits(model, sequences):
    """Logits of each sequence from one packed forward."""
    from megarl.actor.packing import Sample, pack

    samples = [Sample(s[:1], s[1:], np.zeros(len(s) - 1, np.float32), 0.0) for s in sequences]
    batch = pack(samples, range(len(samples)), torch.device("cpu"))
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)[0]
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    lengths = [len(samples[i]) for i in order]
    return dict(zip(order, logits.split(lengths), strict=True))


def random_sequences(lengths, vocab=67):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_transformers(family, tmp_path):
    reference = make_hf_model(family)
    reference.save_pretrained(tmp_path)
    (model,) = load_models(tmp_path)
    sequences = random_sequences([9, 4, 31, 9, 2, 17])
    for index, logits in packed_logits(model, sequences).items():
        expected = reference(torch.from_numpy(sequences[index][None, :-1]).long()).logits[0]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_the_logits_back_to_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    from megarl.actor.hf import export_hf

    reference = make_hf_model(family)
    reference.save_pretrained(tmp_path / "in")
    info = export_hf(load_models(tmp_path / "in"), tmp_path / "out", like=tmp_path / "in", version=7)
    assert info.version == 7
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.from_numpy(random_sequences([23])[0][None]).long()
    assert torch.equal(again(tokens).logits, reference(tokens).logits)
    one, two = load_file(tmp_path / "in/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_weights_hash_follows_the_weights(tmp_path):
    from megarl.actor.hf import export_hf

    make_hf_model("qwen3").save_pretrained(tmp_path / "in")
    models = load_models(tmp_path / "in")
    hashes = [export_hf(models, tmp_path / n, tmp_path / "in", 0).weights_hash for n in ("a", "b")]
    assert hashes[0] == hashes[1]
    with torch.no_grad():
        models[0].decoder.final_layernorm.weight[0] += 1e-3
    assert export_hf(models, tmp_path / "c", tmp_path / "in", 0).weights_hash != hashes[0]


def test_wrong_models_are_named(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(UserError, match="config.json"):
        load_models(tmp_path)
    make_hf_model("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_models(tmp_path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight.*\(5,\)"):
        load_models(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="gpt2"):
        load_models(tmp_path)
