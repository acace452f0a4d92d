"""A gpt-oss as it is published, with MXFP4 experts, is refused with the lines that convert it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.storage.policies import check_weight_files
from tests.actor.conftest import make_hf_model


def quantise(folder):
    """Replace the experts' weights of a saved gpt-oss by random MXFP4 blocks and scales; returns {name: tensor}."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_the_lines_of_the_refusal_convert_the_model(tiny_model, tmp_path):
    source = shutil.copytree(tiny_model, tmp_path / "it's published")
    make_hf_model("gpt_oss", hidden_size=64, intermediate_size=96).bfloat16().save_pretrained(source)
    tensors = quantise(source)
    with pytest.raises(UserError, match=r"quantization_config \(mxfp4\)") as refused:
        read_hf_config(source)
    with pytest.raises(UserError, match="has dtype U8"):
        check_weight_files(source)
    exec(str(refused.value).partition("in Python:\n")[2], {})
    target = source.with_name(f"{source.name}-bf16")
    assert read_hf_config(target)["model_type"] == "gpt_oss"
    check_weight_files(target)
    expected = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.uint8}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        expected[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    written = load_file(target / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == torch.bfloat16 and torch.equal(written[name], tensor), name
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
