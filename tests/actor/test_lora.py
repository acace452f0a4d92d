"""Low-rank adapters: what is trained, what is exported, and what a checkpoint contains and restores."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.actor import checkpoint, lora, reference
from megarl.actor.hf import export_hf
from megarl.actor.model import build_model
from megarl.actor.peft import export_adapters
from megarl.actor.step import Actor
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import check_exported_alone, matrices
from megarl.storage.checked_json import read_checked
from megarl.storage.policies import read_info, weight_files
from megarl.storage.tensor_files import TensorFiles
from tests.actor.conftest import FAMILIES, make_hf_model, make_recipe, read_settings
from tests.actor.test_step import CPU, updates
from tests.actor.test_step import build as build_whole

pytestmark = pytest.mark.usefixtures("one_rank")


def every_target(hf):
    """The targets that are all matrices of a model."""
    layers = range(hf["num_hidden_layers"])
    return sorted({matrix.name.rpartition(".")[2] for layer in layers for matrix in matrices(hf, layer)})


def build(path, lora, recompute="none", **tables):
    table = {"lora": {"rank": 4, "alpha": 6.0, **lora}, "recompute": recompute}
    return Actor.build(make_recipe(path, actor=table, **tables), path, CPU)


def exported(actor, folder, like):
    export_hf(actor.models, folder, like, 1)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "glm4_moe_qk_norm", "qwen3_next", "deepseek_v3", "qwen3_5_moe", "qwen3_5", "minimax_m2"]
)
def test_base_plus_exported_adapters_is_the_merged_export(family, tmp_path):
    make_hf_model(family).save_pretrained(tmp_path / "in")
    actor = build(tmp_path / "in", {"targets": every_target(read_hf_config(tmp_path / "in"))})
    for adapter in actor.models[0].adapters.values():
        torch.nn.init.normal_(adapter.b, std=0.1)
    export_hf(actor.models, tmp_path / "out", tmp_path / "in", 7)
    table = actor.recipe.actor.lora
    export_adapters(actor.models, tmp_path / "adapters", table, Path("models/base"), actor.base, 7)
    tensors = load_file(tmp_path / "adapters/adapter_model.safetensors")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6.0, "models/base")
    info = read_checked(tmp_path / "adapters/megarl.json", "")
    assert info == {"version": 7, "base_weights_hash": read_info(tmp_path / "in").weights_hash}
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    assert {module.rpartition(".")[2] for module in modules} == set(config["target_modules"])
    assert len(tensors) == 2 * len(modules)
    assert check_peft(tmp_path / "in", tmp_path / "adapters", tmp_path / "out") == len(modules)


def check_peft(base_dir, adapters_dir, merged_dir):
    """Assert that by PEFT's rule base and adapters are the merged model; returns how many tensors the adapters change.

    NAME.weight + lora_alpha / r * lora_B @ lora_A for each module NAME; all else is the base's.
    """
    tensors = load_file(adapters_dir / "adapter_model.safetensors")
    config = json.loads((adapters_dir / "adapter_config.json").read_text())
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    untouched, changed = dict(stored_tensors(base_dir)), 0
    with TensorFiles(weight_files(base_dir)) as base, TensorFiles(weight_files(merged_dir)) as merged:
        for module in sorted(modules):
            name = module.removeprefix("base_model.model.") + ".weight"
            a, b = (tensors[f"{module}.lora_{x}.weight"].double() for x in "AB")
            assert a.shape[0] == b.shape[1] == config["r"]
            before, after = (files.region(name).read(0, b.shape[0]) for files in (base, merged))
            value = before.double() + config["lora_alpha"] / config["r"] * b @ a
            changed += not torch.equal(before, after)
            rounding = torch.finfo(torch.float32).eps * float(value.abs().max())
            assert float((after.double() - value).abs().max()) <= 2 * rounding, name
            untouched.pop(base.stored_name(name), None)
    after = dict(stored_tensors(merged_dir))
    assert all(torch.equal(after[name], value) for name, value in untouched.items())
    return changed


def test_exporting_adapters_of_transposed_experts_alone_is_refused(tmp_path):
    hf = read_settings(tmp_path, "gpt_oss")
    experts, attention = ({"lora": {"targets": ["linear_qkv", name]}} for name in ("linear_fc2", "linear_proj"))
    with pytest.raises(UserError, match="one transposed tensor, .* no names for adapters of mlp.experts.*fc2"):
        check_exported_alone(make_recipe(tmp_path, actor=experts), hf)
    check_exported_alone(make_recipe(tmp_path, actor=attention), hf)


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_qk_norm"])
def test_vllm_loads_names_scale_and_values_of_exported_adapters(family, tmp_path):
    """``modules`` are those that vLLM expects of a model that has a tensor for each expert."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    make_hf_model(family).save_pretrained(tmp_path / "in")
    actor = build(tmp_path / "in", {})
    export_adapters(actor.models, tmp_path / "adapters", actor.recipe.actor.lora, tmp_path / "in", actor.base, 0)
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    modules |= {f"experts.{expert}.{name}_proj" for expert in range(8) for name in ("gate", "up", "down")}
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapters"), None)
    assert helper._validate_features() == []
    folder = str(tmp_path / "adapters")
    found = LoRAModel.from_local_checkpoint(folder, modules, helper, device="cpu", lora_model_id=1).loras
    tensors = load_file(tmp_path / "adapters/adapter_model.safetensors")
    assert len(tensors) == 2 * len(found)
    with TensorFiles(weight_files(tmp_path / "in")) as base:
        assert all(base.stored_name(f"{name}.weight") for name in found)
    for name, adapter in found.items():
        assert adapter.scaling == 6 / 4
        assert torch.equal(adapter.lora_a, tensors[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(adapter.lora_b, tensors[f"base_model.model.{name}.lora_B.weight"])


def stored_tensors(folder):
    for file in folder.glob("*.safetensors"):
        yield from load_file(file).items()


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "deepseek_v3", "deepseek_v3_moonlight", "qwen3_next", "gpt_oss", "glm4_moe_lite", "minimax_m2"],
)
def test_merged_export_has_the_actors_log_probs_in_transformers(family, saved_model, tmp_path):
    actor = build(saved_model(family), {"targets": every_target(read_hf_config(saved_model(family)))})
    text = [[(7 * i + 3) % 67 for i in range(20)]]
    (first,) = reference.score(actor.models, text, 64, CPU)
    updates(actor, range(3))
    # one that is not in the forward pass would never train, and the merged export would agree with that
    assert all(bool(adapter.b.any()) for adapter in actor.models[0].adapters.values())
    exported(actor, tmp_path / "out", saved_model(family))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(text)).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(text[0][1:])[:, None])[:, 0]
    (scores,) = reference.score(actor.models, text, 64, CPU)
    assert float((torch.from_numpy(scores) - expected).abs().max()) < 1e-4
    assert abs(scores - first).max() > 0.1


def test_adapter_checkpoint_has_the_adapters_alone_and_other_adapters_are_refused(saved_model, tmp_path):
    base = saved_model("qwen3_moe")
    straight = build(base, {})
    updates(straight, range(2))
    path = checkpoint.save(straight, tmp_path / "checkpoints", 2, keep=1)
    trained = sum(p.numel() for p in straight.models[0].parameters() if p.requires_grad)
    stored = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert 3 * 4 * trained < stored < 3 * 4 * trained + 150_000  # float32 with two moments; and headers, random state
    with pytest.raises(UserError, match=r"has adapters of .*'rank': 4.* asks for adapters of"):
        checkpoint.load(build(base, {"targets": ["linear_qkv"]}), path)
    weights = make_hf_model("qwen3_moe")
    with torch.no_grad():
        weights.lm_head.weight[3, 5] += 1e-3
    weights.save_pretrained(tmp_path / "another")
    with pytest.raises(UserError, match="belong to base weights with the hash .* restore the policy"):
        checkpoint.load(build(tmp_path / "another", {}), path)
    with pytest.raises(UserError, match=r"has adapters of .* asks for all weights"):
        checkpoint.load(build_whole(base), path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_has_an_adapter(family, tmp_path):
    """`megarl.models.lora.matrices`, which the checks of a recipe use, agrees with what Megatron builds."""
    hf = read_settings(tmp_path, family)
    recipe = make_recipe(actor={"lora": {"rank": 1, "targets": every_target(hf)}})
    models = build_model(hf, recipe)
    names = {
        name for name, _ in models[0].named_parameters() if re.search(r"linear_\w+\.weight$|experts\.weight[12]$", name)
    }
    lora.attach(models, recipe)
    assert set(models[0].adapters) == names
    for name, adapter in models[0].adapters.items():
        assert adapter.matrix in matrices(hf, int(name.split(".")[2]))


def test_merged_export_keeps_in_the_mean_what_is_below_the_rounding_of_a_weight(tmp_path):
    """The base is bfloat16, and the adapters add about a tenth of a unit in the last place to its weights."""
    make_hf_model("qwen3").bfloat16().save_pretrained(tmp_path / "in")
    actor = build(tmp_path / "in", {})
    for adapter in actor.models[0].adapters.values():
        torch.nn.init.normal_(adapter.b, std=2e-4)
    merged, before = exported(actor, tmp_path / "out", tmp_path / "in"), load_file(tmp_path / "in/model.safetensors")
    export_adapters(actor.models, tmp_path / "adapters", actor.recipe.actor.lora, tmp_path / "in", None, 1)
    adapters = load_file(tmp_path / "adapters/adapter_model.safetensors")
    exact = {}
    for key in (key for key in before if "proj" in key):
        a, b = (adapters[f"base_model.model.{key.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
        exact[key] = before[key].float() + 1.5 * b @ a
    value, base, rounded = (torch.cat([x[key].float().flatten() for key in exact]) for x in (exact, before, merged))
    delta, unit = value - base, torch.exp2(value.abs().log2().floor() - 7)
    size, kept, nearest = (float((x - base) @ delta) for x in (value, rounded, value.bfloat16().float()))
    share = (value.abs() / unit).frac()  # the probability of rounding away from 0
    deviation = float((delta * unit).square() @ (share * (1 - share))) ** 0.5
    assert bool(((rounded - value).abs() <= unit).all())
    assert nearest < 0.3 * size
    assert abs(kept - size) < 4 * deviation < 0.2 * size
    again = exported(actor, tmp_path / "again", tmp_path / "in")
    assert all(torch.equal(again[key], value) for key, value in merged.items())
