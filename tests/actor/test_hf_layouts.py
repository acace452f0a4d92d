"""Hugging Face -> Megatron -> Hugging Face gives back the same bytes in every layout, within bounded memory."""

import json
from functools import reduce

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.storage.policies import weight_files
from tests.actor import hf_worker
from tests.actor.conftest import FAMILIES, LLAMA3_ROPE, SHAPE, auto_model, config_settings
from tests.actor.ranks import once, run_ranks

pytestmark = pytest.mark.layouts

SHAPES = SHAPE | {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
LARGE = {"vocab_size": 20_001, "hidden_size": 512, "num_experts": 8, "moe_intermediate_size": 512, "head_dim": 64}
# name: (model_type, settings, dtype of the weights, most bytes per file)
MODELS = {
    "qwen3_moe_fused": ("qwen3_moe", MOE, torch.bfloat16, 20_000),
    "qwen3_moe_single": ("qwen3_moe", MOE, torch.bfloat16, 10**9),
    "qwen3_moe_large_fused": ("qwen3_moe", MOE | LARGE, torch.bfloat16, 10**9),
    "qwen3": ("qwen3", {}, torch.float32, 20_000),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}, torch.bfloat16, 10**9),
    "qwen2": ("qwen2", {"head_dim": 4}, torch.bfloat16, 10**9),  # attention biases, as in DeepSeek-R1-Distill-Qwen
    "qwen2_tied": ("qwen2", {"head_dim": 4, "tie_word_embeddings": True}, torch.float16, 10**9),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}, torch.bfloat16, 10**9),
    "qwen3_5": ("qwen3_5", FAMILIES["qwen3_5"], torch.bfloat16, 20_000),
    "llama_tied": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, torch.bfloat16, 10**9),
}
OTHERS = {
    "olmoe": {"head_dim": 4},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "glm4_moe_lite": {"num_nextn_predict_layers": 1},
    "minimax_m2": {"num_mtp_modules": 2},
}
MODELS |= {name: (name, FAMILIES[name] | OTHERS.get(name, {}), torch.bfloat16, 20_000) for name in hf_worker.OTHERS}
CASES = [(layout, name) for layout in hf_worker.TAKEN for name in hf_worker.families(layout)]


def make_model(directory, name):
    """Write a random model, with fused experts or one tensor per expert, as one file or as several with an index."""
    from transformers import AutoConfig

    model_type, settings, dtype, file_bytes = MODELS[name]
    torch.manual_seed(0)
    config = {"model_type": model_type} | SHAPES | settings
    if model_type.startswith("qwen3_5"):
        config = config_settings(model_type, **SHAPES | settings)
    model = auto_model(model_type).from_config(AutoConfig.for_model(**config), dtype=dtype)
    model.config.save_pretrained(directory)
    tensors = {key: torch.randn(value.shape).to(dtype) for key, value in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    fused = any(key.endswith("experts.gate_up_proj") for key in tensors)
    assert fused == (model_type in ("qwen3_moe", *hf_worker.OTHERS))
    if not name.endswith("fused") and name != "gpt_oss":  # gpt_oss has no other layout
        tensors = dict(pair for item in tensors.items() for pair in one_tensor_an_expert(*item))
    if name == "qwen3_moe_single":
        tensors |= {k: v.float() for k, v in tensors.items() if k.endswith("mlp.gate.weight")}  # two dtypes in one file
    if name in ("mixtral", "minimax_m2"):
        names = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        tensors = {reduce(lambda key, pair: key.replace(*pair), names.items(), k): v for k, v in tensors.items()}
    if name in ("glm4_moe", "glm4_moe_lite", "minimax_m2"):  # layers for multi-token prediction, which exports copy
        layers = range(4, 6 if name == "minimax_m2" else 5)
        keys = [f"model.layers.{layer}.{key}" for layer in layers for key in ("enorm.weight", "mlp.gate.weight")]
        tensors |= {key: torch.randn(5, 3).to(dtype) for key in keys}
    if name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        tensors |= {f"mtp.{key}": torch.randn(5, 3).to(dtype) for key in ("fc.weight", "layers.0.mlp.gate.weight")}
    (directory / "tokenizer.json").write_text('{"any": "bytes"}')
    (directory / "generation_config.json").write_text("{}")
    save_files(tensors, directory, file_bytes)


def one_tensor_an_expert(name, tensor):
    if name.endswith("experts.gate_up_proj"):
        for e, expert in enumerate(tensor):
            for kind, half in zip(("gate", "up"), expert.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{e}.{kind}_proj.weight"), half.clone()
    elif name.endswith("experts.down_proj"):
        for e, expert in enumerate(tensor):
            yield name.replace("down_proj", f"{e}.down_proj.weight"), expert.clone()
    else:
        yield name, tensor


def save_files(tensors, directory, file_bytes):
    files, size = [[]], 0
    for key, tensor in tensors.items():
        if size + tensor.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(key)
        size += tensor.nbytes
    if len(files) == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = {key: f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i, keys in enumerate(files) for key in keys}
    for keys in files:
        save_file({key: tensors[key] for key in keys}, directory / names[keys[0]], metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def stored(directory):
    """{tensor name: tensor} of a model directory, as the library safetensors reads it."""
    tensors = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, no mapping
                assert key not in tensors
                tensors[key] = file.get_tensor(key)
    return tensors


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The directory in which four processes have taken every model through its layouts."""
    return once(tmp_path_factory, "hf_layouts", take_every_model_through_its_layouts)


def take_every_model_through_its_layouts(root):
    (root / "results").mkdir()
    for name in MODELS:
        (root / "models" / name).mkdir(parents=True)
        make_model(root / "models" / name, name)
    run_ranks(hf_worker.main, (root,), hf_worker.WORLD)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_exported_tensors_equal_the_original_ones_byte_for_byte(root, layout, name):
    source, target = root / "models" / name, root / "exports" / layout / name
    before, after = stored(source), stored(target)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (after[key].dtype, after[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)), key
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (target / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("layout", hf_worker.TAKEN)
def test_loading_and_exporting_need_at_most_the_largest_tensor_and_a_block(root, layout):
    """On every rank, in addition to its parameters."""
    block = 4 * 2**20
    largest = max(tensor.nbytes for tensor in stored(root / "models" / "qwen3_moe_large_fused").values())
    assert largest == 20_001 * 512 * 2
    for rank in range(hf_worker.LAYOUTS[layout].ranks):
        result = json.loads((root / "results" / f"{layout}-qwen3_moe_large_fused-{rank}.json").read_text())
        print(layout, rank, {key: f"{value / 2**20:.1f} MiB" for key, value in result.items()})
        assert max(result.values()) < largest + block, result


def test_exports_of_many_files_load_into_transformers(root):
    """Transformers reads the same weights from the export of four ranks, by its index, as from the original."""
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
        for path in (root / "models/qwen3_moe_fused", root / "exports/TP2 EP2 ETP2/qwen3_moe_fused")
    ]
    assert len(weight_files(root / "exports/TP2 EP2 ETP2/qwen3_moe_fused")) == 4
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
