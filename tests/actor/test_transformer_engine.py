"""Layers with Transformer Engine's products, with torch stand-ins for its classes: every composition of layers,
adapters, precision and replay against the torch-native layers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.actor.te_worker import COMPOSITIONS, KINDS, RESUMED
from tests.actor.test_lora import check_peft
from tests.extent import EVERY, few
from tests.helpers import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"
FAMILIES = [*few(("qwen3_moe", "qwen2", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next"), "qwen2", "gpt_oss", "olmoe")]
if os.environ.get("MEGARL_EVERY_LAYOUT"):  # all that docs/compositions.md has on Transformer Engine
    FAMILIES += ["llama", "qwen3", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_5_moe", "deepseek_v3_moonlight"]
DENSE = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The results of `te_worker` for all families, and its folder; one process, because its imports take seconds.

    With every case, one family has the oldest version that Megatron declares.
    """
    folder, oldest = tmp_path_factory.mktemp("compared"), ["olmoe"] * EVERY
    newest = compute(folder, *(family for family in FAMILIES if family not in oldest))
    return newest | (compute(folder, *oldest, TE_STAND_IN="2.9.0") if oldest else {}), folder


def compute(folder, *families, **variables):
    """{family: what `te_worker` prints about it}."""
    command = [sys.executable, "-m", "tests.actor.te_worker", str(folder), *families]
    # Megatron's fused functions uncompiled, since compiling them would take most of the time
    path = f"{STAND_INS}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_either_kind_compute_the_same_updates_and_exports(family, compared):
    result, folder = compared[0][family], compared[1] / family
    experts = family not in DENSE
    assert any(".mlp.experts.linear_fc1.weight3" in name for name in result["names"]) == experts
    compositions = COMPOSITIONS if experts else ("", " lora")
    for composition in compositions:
        ours, theirs = (result["losses"][f"{kind}{composition}"] for kind in KINDS)
        assert theirs == pytest.approx(ours, rel=1e-4), composition
        assert ours[1] != pytest.approx(ours[0], rel=1e-3)  # an update changes the loss by far more
        policies = [load_file(folder / f"{kind}{composition}" / "model.safetensors") for kind in KINDS]
        before = load_file(folder / "model/model.safetensors")
        for name, tensor in policies[0].items():
            assert float((policies[1][name] - tensor).abs().max()) < 1e-4, name
        assert sum(not tensor.equal(before[name]) for name, tensor in policies[0].items()) > 3
    for composition in compositions:
        ours, engines = result["scores"][f"transformer_engine{composition}"]
        assert engines == pytest.approx(ours, abs=1e-4), composition  # of the built-in engine
    for composition in [x for x in compositions if "lora" in x and family != "gpt_oss"]:
        name = f"transformer_engine{composition}"
        assert check_peft(folder / "model", folder / f"{name} adapters", folder / name) > 3
    for composition in compositions:  # adapters begin at zero, and the policy that generated is the one that begins
        plain = composition.removeprefix(" lora").replace(" actor", "")
        if plain in compositions:
            first = result["losses"][f"torch{plain}"][0]
            assert result["losses"][f"torch{composition}"][0] == pytest.approx(first, rel=1e-4), composition
    if experts:
        replayed = compositions[-1]
        assert result["losses"][f"torch{replayed}"][0] != pytest.approx(result["losses"]["torch"][0], rel=1e-4)
        assert 0.1 < result["routing"][f"torch{replayed}"] < 1  # the recorded experts are random


@pytest.mark.parametrize("family", FAMILIES)
def test_products_in_8_bits_change_the_loss_by_their_rounding_alone(family, compared):
    """The two first losses are those of products rounded to bfloat16, the third one of those rounded to 8 bits."""
    result = compared[0][family]
    for name in (name for name in result["losses"] if name.startswith("fp8")):
        (first, _, coarse), same = result["losses"][name], name.replace("fp8", "transformer_engine")
        assert result["products"][name] > 0 == result["products"][same]
        assert 0 < abs(first - result["losses"][same][0]) < 0.03, name
        assert math.isfinite(coarse)


@pytest.mark.parametrize("adapters", ["", " lora"])
@pytest.mark.parametrize("family", [family for family in RESUMED if family in FAMILIES])
def test_a_checkpoint_of_either_kind_continues_in_the_other(family, adapters, compared):
    losses = compared[0][family]["resumed"][adapters]
    for way, loss in losses.items():
        assert loss == pytest.approx(losses["torch"], rel=1e-4), way
