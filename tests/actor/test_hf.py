"""Hugging Face import and export: same logits as transformers, same bytes after a round trip."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.actor.hf import export_hf, load_hf
from megarl.actor.model import build_model
from megarl.actor.packing import Sample, pack
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from tests.actor.conftest import FAMILIES, make_hf_model, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")


def load_models(path):
    models = build_model(read_hf_config(path), make_recipe(path))
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


def load(folder):
    return load_file(folder / "model.safetensors")


def save(tensors, folder):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_and_an_export_has_the_same_tensors(family, tmp_path):
    """The longest sequences are several chunks of a gated delta net."""
    reference = make_hf_model(family, max_position_embeddings=256)
    reference.save_pretrained(tmp_path / "in")
    (model,) = models = load_models(tmp_path / "in")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 67, n).astype(np.int32) for n in (9, 4, 151, 9, 2, 66, 17)]
    for index, logits in packed_logits(model, sequences).items():
        expected = reference(torch.from_numpy(sequences[index][None, :-1]).long()).logits[0]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    assert export_hf(models, tmp_path / "out", like=tmp_path / "in", version=7).version == 7
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "in/config.json").read_bytes()
    one, two = load(tmp_path / "in"), load(tmp_path / "out")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_export_in_16_bits_keeps_the_value_in_the_mean(dtype, tmp_path):
    """All weights are an eighth of a unit in their last place above 1, which the nearest number would lose."""
    make_hf_model("qwen3").to(dtype).save_pretrained(tmp_path / "in")
    models, unit = load_models(tmp_path / "in"), torch.finfo(dtype).eps
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.fill_(1 + unit / 8)
    one, again = (export_hf(models, tmp_path / name, tmp_path / "in", 1) for name in ("out", "again"))
    assert one.weights_hash == again.weights_hash
    assert {weight.dtype for weight in load(tmp_path / "out").values()} == {dtype}
    rounded = (torch.cat([weight.double().flatten() for weight in load(tmp_path / "out").values()]) - 1) / unit
    assert set(rounded.tolist()) == {0, 1}
    assert abs(float(rounded.mean()) - 1 / 8) < 4 * (1 / 8 * 7 / 8 / len(rounded)) ** 0.5


EXPERTS = "model.layers.1.mlp.experts"
ODD = "gate_up_proj{0} has 49 gate and up projections, an odd number"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3", {"model.layers.1.mlp.up_proj.weight": None}, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        ("qwen3", {"model.norm.weight": torch.zeros(5)}, r"model\.norm\.weight.*\(5,\)"),
        ("qwen3", {"model.norm.weight": torch.zeros(32).char()}, r"model\.norm\.weight' has dtype I8"),
        ("qwen3", {"model.layers.0.mlp.gate.weight": torch.zeros(4, 32)}, r"1 tensors that a model .*0\.mlp\.gate"),
        # half of 49, rounded down, is the expected size, but then the parts of later experts would be misplaced
        ("gpt_oss", {f"{EXPERTS}.gate_up_proj_bias": torch.zeros(4, 49)}, ODD.format("_bias")),
        ("gpt_oss", {f"{EXPERTS}.gate_up_proj": torch.zeros(4, 32, 49)}, ODD.format("")),
        ("qwen3_moe", {f"{EXPERTS}.gate_up_proj": torch.zeros(4, 49, 32)}, ODD.format("")),
        ("qwen3_moe", {f"{EXPERTS}.down_proj": torch.zeros(4, 32)}, r"no tensor .*down_proj"),
    ],
)
def test_errors_name_tensors_that_do_not_fit(family, changes, words, tmp_path):
    """Fused experts take the place of those that transformers may have written as one tensor per expert."""
    make_hf_model(family).save_pretrained(tmp_path)
    stored = {name: tensor.clone() for name, tensor in load(tmp_path).items()}
    if family == "qwen3_moe":
        stored = {name: tensor for name, tensor in stored.items() if f"{EXPERTS}." not in name}
        stored |= {f"{EXPERTS}.gate_up_proj": torch.zeros(4, 48, 32), f"{EXPERTS}.down_proj": torch.zeros(4, 32, 24)}
    save({name: tensor for name, tensor in (stored | changes).items() if tensor is not None}, tmp_path)
    with pytest.raises(UserError, match=words):
        load_models(tmp_path)


def test_errors_name_damaged_and_missing_files(tmp_path):
    make_hf_model("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors is not a readable safetensors file"):
            load_models(tmp_path)
    file.write_bytes(whole)
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "copy.safetensors")
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
    tensors = {name: tensor.clone() for name, tensor in load(tmp_path / "in").items()}
    save(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "in")
    export_hf(load_models(tmp_path / "in"), tmp_path / "out", tmp_path / "in", 0)
    one, two = (tmp_path / d / "model.safetensors" for d in ("in", "out"))
    assert one.read_bytes() == two.read_bytes()
