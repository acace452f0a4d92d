"""Layers with Transformer Engine's products, with torch stand-ins for its classes: every composition of layers,
adapters and replay against the torch-native layers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extent import EVERY, few
from tests.helpers import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"
FAMILIES = [*few(("qwen3_moe", "qwen2", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next"), "qwen2", "gpt_oss", "olmoe")]
if os.environ.get("MEGARL_EVERY_LAYOUT"):  # all that docs/compositions.md has on Transformer Engine
    FAMILIES += ["llama", "qwen3", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_5_moe", "deepseek_v3_moonlight"]
    FAMILIES += ["glm4_moe_lite", "minimax_m2", "qwen3_5"]
# with every case, one family has the oldest version that Megatron declares
OLDEST = ["olmoe"] * EVERY
VERSIONS = {"2.11.0": [family for family in FAMILIES if family not in OLDEST]} | ({"2.9.0": OLDEST} if EVERY else {})


@pytest.mark.parametrize("version", VERSIONS)
def test_layers_of_either_kind_agree_in_every_composition(version, tmp_path):
    """In one process for all families, because its imports take seconds; `te_worker` says what it compares."""
    command = [sys.executable, "-m", "tests.actor.te_worker", str(tmp_path), *VERSIONS[version]]
    # Megatron's fused functions uncompiled, since compiling them would take most of the time
    path = f"{STAND_INS}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "TE_STAND_IN": version}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
