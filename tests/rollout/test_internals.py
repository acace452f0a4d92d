"""What docs/rollout_engines.md lists of the insides of vLLM and SGLang is there in the installed versions."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, SGLANG_PYTHON

ENGINES = ("vllm", "sglang")
ROW = re.compile(r"\| (vllm|sglang) \| `([^`]+\.py)` \| `([^`]+)` \|")
TABLE = ROW.findall((ROOT / "docs/rollout_engines.md").read_text())


def package(engine):
    """The folder of an engine's package."""
    if engine == "vllm":
        return Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    probe = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"
    return Path(subprocess.run([SGLANG_PYTHON, "-c", probe], capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES])
def test_the_installed_version_has_them(engine):
    rows, folder = [(file, name) for of, file, name in TABLE if of == engine], package(engine)
    assert len(rows) >= 7
    missing = [
        (file, name)
        for file, name in rows
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (folder / file).read_text())
    ]
    assert missing == []


def test_the_table_has_all_that_the_code_names():
    """Every attribute of vLLM's own objects, every variable and path of SGLang that is not for its users."""
    listed = {name for _, _, name in TABLE}
    vllm, sglang = ((ROOT / f"megarl/rollout/{name}.py").read_text() for name in ("vllm", "sglang/engine"))
    attributes = set(re.findall(r"(?:_engine|processor|state|cache)\.(\w+)", vllm))
    public = {"collective_rpc", "reset_prefix_cache", "add_request", "abort_request", "step", "model_config"}
    public |= {"has_unfinished_requests", "vllm_config", "block_size", "detokenizer"}
    assert attributes - public <= listed
    assert set(re.findall(r"SGLANG_\w+", sglang)) <= listed
