"""Hugging Face import and export: same logits as transformers, same bytes after a round trip."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.actor import hf
from megarl.actor.hf import load_hf
from megarl.actor.model import build_model
from megarl.actor.packing import Sample, pack
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from tests.actor.conftest import FAMILIES, make_hf_model, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")


def load_models(path, megatron=None):
    models = build_model(read_hf_config(path), make_recipe(path, megatron=megatron or {}))
    load_hf(models, path)
    return models


def packed_logits(model, sequences):
    """{index of a sequence: its logits}, from one packed forward pass."""
    samples = [Sample(s[:1], s[1:], np.zeros(len(s) - 1, np.float32), 0.0) for s in sequences]
    batch = pack(samples, range(len(samples)), torch.device("cpu"))
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)[0]
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    lengths = [len(samples[i]) for i in order]
    return dict(zip(order, logits.split(lengths), strict=True))


def export_hf(*arguments, **options):
    return hf.export_hf(*arguments, **options)


def random_sequences(lengths, vocab=67):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_and_an_export_has_the_same_tensors(family, tmp_path):
    reference = make_hf_model(family)
    reference.save_pretrained(tmp_path / "in")
    (model,) = models = load_models(tmp_path / "in")
    sequences = random_sequences([9, 4, 31, 9, 2, 17])
    for index, logits in packed_logits(model, sequences).items():
        expected = reference(torch.from_numpy(sequences[index][None, :-1]).long()).logits[0]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    info = export_hf(models, tmp_path / "out", like=tmp_path / "in", version=7)
    assert info.version == 7
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "in/config.json").read_bytes()
    one, two = load_file(tmp_path / "in/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_weights_hash_changes_with_the_weights_alone(tmp_path):
    make_hf_model("qwen3").save_pretrained(tmp_path / "in")
    models = load_models(tmp_path / "in")
    hashes = [export_hf(models, tmp_path / n, tmp_path / "in", 0).weights_hash for n in ("a", "b")]
    assert hashes[0] == hashes[1]
    with torch.no_grad():
        models[0].decoder.final_layernorm.weight[0] += 1e-3
    assert export_hf(models, tmp_path / "c", tmp_path / "in", 0).weights_hash != hashes[0]


def test_errors_name_what_is_wrong_with_a_model(tmp_path):
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


@pytest.mark.parametrize(
    ("family", "tensor", "shape", "words"),
    [
        ("gpt_oss", "gate_up_proj_bias", (4, 49), r"gate_up_proj_bias has 49 gate and up projections, an odd number"),
        ("gpt_oss", "gate_up_proj", (4, 32, 49), r"gate_up_proj has 49 gate and up projections, an odd number"),
        ("gpt_oss", "down_proj_bias", (4, 33), r"down_proj_bias has shape \(33,\)"),
        ("qwen3_moe", "gate_up_proj", (4, 49, 32), r"gate_up_proj has 49 gate and up projections, an odd number"),
        ("qwen3_moe", "down_proj", (4, 32), r"no tensor .*down_proj"),
    ],
)
def test_errors_name_fused_experts_of_a_wrong_shape(family, tensor, shape, words, tmp_path):
    """Half of 49, rounded down, is the expected size, but then the parts of later experts would be misplaced."""
    make_hf_model(family).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for number in range(4):  # removed if transformers has written one tensor per expert
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors.pop(f"model.layers.1.mlp.experts.{number}.{name}.weight", None)
    tensors[f"model.layers.1.mlp.experts.{tensor}"] = torch.zeros(shape)
    if family == "qwen3_moe":
        other, its = ("down_proj", (4, 32, 24)) if tensor == "gate_up_proj" else ("gate_up_proj", (4, 48, 32))
        tensors[f"model.layers.1.mlp.experts.{other}"] = torch.zeros(its)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=words):
        load_models(tmp_path)


def test_errors_name_damaged_and_unexpected_weights(tmp_path):
    make_hf_model("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # `load_file` maps the file
    for damaged in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors is not a readable safetensors file"):
            load_models(tmp_path)
    save_file(tensors | {"model.layers.0.mlp.gate.weight": torch.zeros(4, 32)}, file)
    with pytest.raises(
        UserError, match=r"1 tensors that a model of its config.json does not have.*layers\.0\.mlp\.gate"
    ):
        load_models(tmp_path)
    save_file(tensors | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, file)
    with pytest.raises(UserError, match=r"model\.norm\.weight' has dtype I8"):
        load_models(tmp_path)
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "copy.safetensors")
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"copy\.safetensors and in .*model\.safetensors"):
        load_models(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model-2.safetensors"}}')
    with pytest.raises(UserError, match=r"names model-2\.safetensors, which does not exist"):
        load_models(tmp_path)
    index.write_text('{"weight_map": {"any": "model.safetensors"}}')  # the index leaves copy.safetensors out
    load_models(tmp_path)


def test_tied_model_that_stores_its_lm_head_is_exported_with_it(tmp_path):
    make_hf_model("qwen3_tied").save_pretrained(tmp_path / "in")
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "in/model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    export_hf(load_models(tmp_path / "in"), tmp_path / "out", tmp_path / "in", 0)
    one, two = (tmp_path / d / "model.safetensors" for d in ("in", "out"))
    assert one.read_bytes() == two.read_bytes()


def test_weights_that_a_megatron_setting_leaves_unused_are_refused(tmp_path):
    make_hf_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"4 tensors that a model of its config.json does not have.*self_attn\.k_norm"):
        load_models(tmp_path, megatron={"qk_layernorm": False})


@pytest.mark.parametrize("override", [{"glu_linear_offset": 0.0}, {"window_size": []}, {"window_attn_skip_freq": 0}])
def test_megatron_settings_that_config_json_decides_are_refused(tmp_path, override):
    make_hf_model("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="config.json decides it"):
        load_models(tmp_path, megatron=override)
