"""Who may import whom: heavy packages stay behind the one module that needs them, and imports go downwards only.

Each module is imported in a process of its own that has loaded nothing of megarl yet. To pay for torch and Megatron
once, these processes are forks of one that has loaded a base package and nothing else.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import megarl

PACKAGE = Path(megarl.__file__).parent
MODULES = ["megarl", *(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "megarl."))]
HEAVY = {  # package: the modules (and everything below them) that may bring it in by being imported
    "megatron": ("megarl.actor", "megarl.phases"),
    "transformers": (
        "megarl.actor",
        "megarl.data.prompts",
        "megarl.phases",
        "megarl.rollout",
    ),
    "vllm": ("megarl.rollout.vllm",),
    "sglang": ("megarl.rollout.sglang.engine",),
    "nemo_run": (),
}
IMPORTERS = HEAVY | {"megatron": ("megarl.actor",)}  # the modules that may hold the import statement, lazy or not
WITHOUT_TORCH = (
    "megarl",
    "megarl.recipe.load",
    "megarl.errors",
    "megarl.storage.files",
    "megarl.storage.ledger",
    "megarl.recipe.tables",
    "megarl.storage.rollouts",
)
LIGHT = ("megarl.recipe.load", "megarl.kernels", "megarl.objectives", "megarl.storage.rollouts")
LAYERS = ("batch", "kernels", "objectives", "actor", "phases", "train", "cli")

FORKS = """
import importlib, json, os, sys
bases, modules, watched = json.loads(sys.argv[1])
for base in bases:
    importlib.import_module(base)
for module in modules:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            importlib.import_module(module)
            result = [name for name in watched if name in sys.modules]
        except ImportError as error:
            result = f"{type(error).__name__}: {error}"
        print(json.dumps([module, result]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imported(bases: list[str], modules: list[str], watched: list[str]) -> dict[str, list[str] | str]:
    """For each module, which of `watched` its import brings in, or why it cannot be imported."""
    arguments = json.dumps([bases, modules, watched])
    command = [sys.executable, "-W", "ignore", "-c", FORKS, arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    found = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["megarl'))
    assert list(found) == modules, result.stdout + result.stderr
    return found


def violations(found: dict[str, list[str] | str]) -> list[str]:
    wrong = []
    for module, result in found.items():
        if isinstance(result, str):  # an engine that is not installed
            missing = [
                f"ModuleNotFoundError: No module named {name!r}" for name in HEAVY if within(module, HEAVY[name])
            ]
            wrong += [] if result in missing else [f"{module} cannot be imported: {result}"]
        else:
            wrong += [f"{module} imports {name}" for name in result if not within(module, HEAVY[name])]
    return wrong


def test_config_and_store_do_without_torch() -> None:
    watched = ["torch", *HEAVY]
    assert imported([], list(WITHOUT_TORCH), watched) == {module: [] for module in WITHOUT_TORCH}


@pytest.mark.parametrize("module", LIGHT)
def test_light_packages_in_a_fresh_process(module: str) -> None:
    script = f"import sys, {module}; print([name for name in {list(HEAVY)} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


def test_heavy_packages_come_in_where_they_may() -> None:
    modules = [module for module in MODULES if not within(module, ("megarl.actor",))]
    assert violations(imported(["torch"], modules, list(HEAVY))) == []


def test_actor_imports_no_engine() -> None:
    bases = ["torch", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer"]
    modules = [module for module in MODULES if within(module, ("megarl.actor",))]
    assert violations(imported(bases, modules, list(HEAVY))) == []


def statements(module: str) -> list[str]:
    """Everything that `module` imports anywhere in its source, lazily or for type checkers too."""
    path = PACKAGE.parent / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_import_statements_stand_where_they_may() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in statements(module)
        if (heavy := name.split(".")[0]) in HEAVY and not within(module, IMPORTERS[heavy])
    ]
    assert wrong == []


def test_imports_go_downwards() -> None:
    wrong = []
    for module in MODULES:
        layer = [*module.split("."), ""][1]
        if layer in LAYERS:
            above = tuple(f"megarl.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :])
            wrong += [f"{module} imports {name}" for name in statements(module) if within(name, above)]
    assert wrong == []
