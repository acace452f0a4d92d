"""Hugging Face -> Megatron -> Hugging Face gives back the same bytes in every layout, within bounded memory."""

import ctypes
import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from megarl.storage.policies import weight_files
from tests.actor import layout_ranks
from tests.actor.conftest import make_hf_model
from tests.actor.ranks import run_ranks
from tests.extent import few
from tests.helpers import peak_memory

pytestmark = pytest.mark.layouts

WORLD = 4  # processes; a layout with fewer ranks uses the first ones
LAYOUTS = {**layout_ranks.LAYOUTS, "TP2 EP2 ETP2": layout_ranks.Layout(4, {"tensor_parallel": 2, "expert_parallel": 2})}
TAKEN = few(LAYOUTS, "one", "TP2 EP2", "PP2 VPP2", "TP2 EP2 ETP2")
FUSED = "qwen3_moe fused"
LARGE = "qwen3_moe fused, large"
WIDE = {"vocab_size": 20_001, "hidden_size": 512, "num_experts": 8, "moe_intermediate_size": 512, "head_dim": 64}
# name, which begins with the family: changes of its tiny model
EXPERTS = {"qwen3_moe": {}, FUSED: {}, LARGE: WIDE}
DENSE = {name: {} for name in ("qwen3", "qwen3_tied", "qwen2", "llama_rope_scaling", "qwen3_5")}
# families with other names of tensors and other ways to divide them; only in the layouts that divide most tensors
OTHERS = {name: {} for name in ("mixtral", "olmoe", "qwen2_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "qwen3_5_moe")}
OTHERS |= {name: {"num_nextn_predict_layers": 1} for name in ("glm4_moe", "glm4_moe_lite")}
OTHERS |= {"minimax_m2": {"num_mtp_modules": 2}}
OTHER_LAYOUTS = ("TP2 EP2", "PP2 VPP2", "PP2 uneven")
MODELS = EXPERTS | DENSE | OTHERS


def models_of(layout):
    """The models that go through a layout; through one with expert parallelism, only those that have experts."""
    dense = {} if "expert_parallel" in LAYOUTS[layout].actor else DENSE
    return [*EXPERTS, *dense, *(OTHERS if layout in OTHER_LAYOUTS else {})]


def make_model(directory, name):
    """Write a random model: one tensor per expert or fused ones, one file or several with an index, one dtype or two,
    and layers for multi-token prediction, which exports copy."""
    family, changes = name.partition(" ")[0], MODELS[name]
    model = make_hf_model(family, num_hidden_layers=4, **changes).to(
        torch.float16 if name == "qwen2" else torch.bfloat16
    )
    tensors = model.state_dict()
    if name == "qwen3_moe":
        tensors |= {key: x.float() for key, x in tensors.items() if key.endswith("mlp.gate.weight")}
    extra = range(4, 6 if family == "minimax_m2" else 5) if changes and name != LARGE else ()
    names = [f"model.layers.{layer}.{key}" for layer in extra for key in ("enorm.weight", "mlp.gate.weight")]
    names += ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"] if family.startswith(("qwen3_5", "qwen3_next")) else []
    tensors |= {key: torch.randn(5, 3).bfloat16() for key in names}
    one_file = name in ("qwen3_moe", LARGE, "qwen3_tied", "qwen2")
    model.save_pretrained(
        directory,
        state_dict=tensors,
        max_shard_size="5GB" if one_file else "20KB",
        save_original_format="fused" not in name,
    )
    (directory / "tokenizer.json").write_text('{"any": "bytes"}')
    (directory / "generation_config.json").write_text("{}")


def stored(directory):
    """{tensor name: tensor} of a model directory, as the library safetensors reads it."""
    tensors = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, no mapping
                assert key not in tensors
                tensors[key] = file.get_tensor(key)
    return tensors


def take_models_through_layouts(rank, root):
    """One of the ranks. Each layout loads what the one before it exported, so a model goes from layout to layout.

    The memory that loading and exporting need besides the parameters is written to ``results/``.
    """
    from megatron.core import parallel_state as mpu

    from megarl.actor import parallel
    from megarl.actor.hf import export_hf, load_hf
    from megarl.actor.model import build_model
    from megarl.models.hf_config import read_hf_config

    m_mmap_threshold, m_arena_max = -3, -8  # malloc.h; malloc then returns freed blocks to the system at once
    libc = ctypes.CDLL(None)
    assert libc.mallopt(m_mmap_threshold, 65536) and libc.mallopt(m_arena_max, 2)
    sources = {name: root / "models" / name for name in MODELS}
    for layout in TAKEN:
        ranks = LAYOUTS[layout].ranks
        targets = {name: root / "exports" / layout / name for name in models_of(layout)}
        if rank < ranks:
            store = dist.FileStore(str(root / f"store {layout}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            parallel.build_groups(layout_ranks.recipe_of(LAYOUTS[layout], sources["qwen3"]))
            for name, target in targets.items():
                source = sources[name]
                models = build_model(read_hf_config(source), layout_ranks.recipe_of(LAYOUTS[layout], source))
                assert len(models) == (2 if layout == "PP2 VPP2" else 1)
                used = [peak_memory(lambda: load_hf(models, source))[1]]  # noqa: B023, called at once
                used.append(peak_memory(lambda: export_hf(models, target, like=source, version=3))[1])  # noqa: B023
                (root / "results" / f"{layout}-{name}-{rank}.json").write_text(json.dumps(used))
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
        sources |= targets


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The directory in which four processes have taken every model through its layouts."""
    root = tmp_path_factory.mktemp("layouts")
    (root / "results").mkdir()
    for name in MODELS:
        make_model(root / "models" / name, name)
    run_ranks(take_models_through_layouts, (root,), WORLD)
    return root


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in TAKEN for name in models_of(layout)])
def test_exported_tensors_equal_the_original_ones_byte_for_byte(root, layout, name):
    source, target = root / "models" / name, root / "exports" / layout / name
    before, after = stored(source), stored(target)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (after[key].dtype, after[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)), key
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (target / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("layout", TAKEN)
def test_loading_and_exporting_need_at_most_the_largest_tensor_and_a_block(root, layout):
    """On every rank, in addition to its parameters."""
    block = 4 * 2**20
    largest = max(tensor.nbytes for tensor in stored(root / "models" / LARGE).values())
    assert largest == 20_001 * 512 * 2
    for rank in range(LAYOUTS[layout].ranks):
        used = json.loads((root / "results" / f"{layout}-{LARGE}-{rank}.json").read_text())
        assert max(used) < largest + block, used


def test_exports_of_many_files_load_into_transformers(root):
    """Transformers reads the same weights from the export of four ranks, by its index, as from the original."""
    from transformers import AutoModelForCausalLM

    folders = (root / "models" / FUSED, root / "exports/TP2 EP2 ETP2" / FUSED)
    original, exported = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16).state_dict() for f in folders)
    assert len(weight_files(folders[1])) > 3
    assert all(torch.equal(exported[key], tensor) for key, tensor in original.items())
