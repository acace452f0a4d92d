"""Transformer Engine's layers, with torch stand-ins for its classes: names, updates, exports and checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"


FAMILIES = {  # name in `tests.actor.conftest`: whether the first layer has experts
    "qwen3_moe": True,
    "qwen2": False,
    "qwen2_moe": True,
    "glm4_moe": False,
    "mixtral": True,
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The results of `te_worker` for all families, and its folder; one process, because its imports take seconds."""
    folder = tmp_path_factory.mktemp("compared")
    command = [sys.executable, "-m", "tests.actor.te_worker", str(folder), *FAMILIES]
    # Megatron's fused functions uncompiled, since compiling them would take most of the time
    env = os.environ | {"PYTHONPATH": f"{STAND_INS}:{ROOT}", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engines_layers_train_export_and_resume_like_torch_modules(family, compared):
    result, folder = compared[0][family], compared[1] / family
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in result["names"]
    moe = "decoder.layers.0.mlp.experts.linear_fc1.weight3" in result["names"]
    assert moe == FAMILIES[family]

    source, exported = folder / "model/model.safetensors", folder / "exported/model.safetensors"
    assert source.read_bytes() == exported.read_bytes()
    ours, theirs = (result["losses"][kind] for kind in ("torch", "transformer_engine"))
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert ours[2] != pytest.approx(ours[1], rel=1e-2)  # an update changes the loss by far more than the tolerance
    for way, loss in result["resumed"].items():
        assert loss == pytest.approx(ours[2], rel=1e-4), way
