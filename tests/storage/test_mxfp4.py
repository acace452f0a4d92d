"""Weights quantised as MXFP4 are dequantised to the same bfloat16 weights as by transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.storage.policies import check_policy, copy_policy, read_info
from megarl.storage.tensor_files import dequantised
from tests.actor.conftest import make_hf_model
from tests.storage.quantised import quantise

WIDTHS = {"hidden_size": 64, "intermediate_size": 96}


def quantised_model(folder, files=1):
    make_hf_model("gpt_oss", **WIDTHS).bfloat16().save_pretrained(folder)
    return quantise(folder, files)


def stored(folder):
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def test_every_byte_and_scale_is_dequantised_as_by_transformers():
    """This includes scales at the ends of bfloat16's range and beyond."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    ours, theirs = dequantised(blocks, scales), convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))
    assert ours[0, 127, 2 * 0x71 :][:2].tolist() == [0.5, 6.0]  # the lower four bits of a byte come first


@pytest.mark.parametrize("files", [1, 3])
def test_the_first_policy_has_the_dequantised_values_of_transformers(tmp_path, files):
    """With three files, the blocks and the scales of a weight are in different files."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = quantised_model(tmp_path / "in", files)
    info = copy_policy(tmp_path / "in", tmp_path / "in", tmp_path / "out")
    expected = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.uint8}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors[name], tensors[name.replace("_blocks", "_scales")]
        expected[name.removesuffix("_blocks")] = convert_moe_packed_tensors(blocks, scales)
    written = stored(tmp_path / "out")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype == torch.bfloat16 and written[name].shape == tensor.shape, name
        assert torch.equal(written[name].view(torch.int16), tensor.view(torch.int16)), name
    check_policy(tmp_path / "out")
    assert info.weights_hash == read_info(tmp_path / "out").weights_hash
    assert read_hf_config(tmp_path / "out").items() >= {"model_type": "gpt_oss", "swiglu_limit": 1.0}.items()
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_transformers_loads_the_same_weights_from_the_quantised_model_and_from_the_policy(tmp_path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    quantised_model(tmp_path / "in")
    copy_policy(tmp_path / "in", tmp_path / "in", tmp_path / "out")
    more = {"in": {"quantization_config": Mxfp4Config(dequantize=True)}, "out": {}}
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16, **options).state_dict()
        for name, options in more.items()
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "'{name}' of MXFP4 weights has no scales"),
        (lambda tensors, name: tensors.pop(f"{name}_blocks"), "'{name}' of MXFP4 weights has no blocks"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:2].clone()}),
            r"has blocks \(4, 192, 2, 16\) and scales \(2, 192, 2\)",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_blocks": tensors[f"{name}_blocks"].bfloat16()}),
            "has dtypes torch.bfloat16 and torch.uint8, not uint8",
        ),
        (
            lambda tensors, name: tensors.update({name: torch.zeros(4, 64, 192, dtype=torch.bfloat16)}),
            "'{name}' exists twice",
        ),
    ],
)
def test_inconsistent_mxfp4_tensors_are_named(tmp_path, change, words):
    tensors, name = quantised_model(tmp_path / "in"), "model.layers.1.mlp.experts.gate_up_proj"
    change(tensors, name)
    (tmp_path / "in/model-0.safetensors").unlink()
    (tmp_path / "in/model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "in/model.safetensors")
    with pytest.raises(UserError, match=words.format(name=name)):
        copy_policy(tmp_path / "in", tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantisation_other_than_mxfp4_is_refused(tmp_path):
    quantised_model(tmp_path)
    read_hf_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="convert them to bfloat16 first"):
        read_hf_config(tmp_path)
