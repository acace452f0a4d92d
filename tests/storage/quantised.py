"""Makes tiny models whose experts are quantised as MXFP4."""

import json

import torch
from safetensors.torch import load_file, save_file

QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantise(folder, files=1):
    """Replace the expert weights of a saved gpt-oss model by random MXFP4 blocks and scales; returns {name: tensor}.

    files: the number of safetensors files over which the tensors are spread.
    """
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    stored = {f"model-{i}.safetensors": names[i::files] for i in range(files)}
    for file, inside in stored.items():
        save_file({name: tensors[name] for name in inside}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, inside in stored.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": QUANTISATION}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
