"""Which module may import what: heavy packages only where they are needed, and megarl's modules only lower rooms.

Modules are imported one after another, beginning with those that may load the fewest heavy packages, so that the first
one that loads a package is found.
"""

from __future__ import annotations

import functools
import graphlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import megarl
from megarl.recipe.names import ENGINES
from tests.check import named_in

PACKAGE = Path(megarl.__file__).parent
MODULES = ["megarl", *(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "megarl."))]
HEAVY = {  # package: the modules (and everything below them) whose import may load it
    "megatron": ("megarl.actor", "megarl.phases"),
    "transformers": ("megarl.actor", "megarl.data", "megarl.phases", "megarl.rollout"),
    "nemo_run": (),
    **{name: (engine.module,) for name, engine in ENGINES.items()},  # an engine is named like its package
}
IMPORTERS = HEAVY | {"megatron": ("megarl.actor",)}  # the modules that may have the import statement, lazy or not
LIGHT = ("megarl", "megarl.errors", "megarl.workers.node_rank", "megarl.workers.processes")
LIGHT_FOLDERS = ("recipe", "storage", "models", "cli")
OF_TENSORS = ("megarl.storage.tensor_files",)
WITHOUT_TORCH = [  # and without any of the heavy packages
    name
    for name in MODULES
    if name in LIGHT or (".".join(name.split(".")[1:2]) in LIGHT_FOLDERS and name not in OF_TENSORS)
]
# Every folder and module of megarl/, in six rooms, lowest first: each may import its own room and those before it.
CORE = "errors own_file foreign linux heartbeats batch advantages estimates distributed kernels objectives recipe"
ROOMS = {
    "core": (*CORE.split(), "models", "data"),
    "storage": ("storage",),
    "actor, rollout, rewards": ("actor", "rollout", "rewards"),
    "phases": ("phases",),
    "supervision": ("workers", "planner", "views"),
    "commands": ("commands", "cli"),
}
ROOM = {folder: room for room, folders in ROOMS.items() for folder in folders}
APART = ROOMS["actor, rollout, rewards"]  # they meet in a phase, and do not import each other

IMPORTS = """
import importlib, json, os, sys
modules, watched, apart, path = json.loads(sys.argv[1])
sys.path.insert(0, path)
for module in modules:
    if module in apart:
        if os.fork():
            os.wait()
            continue
        sys.path.remove(path)
    before = set(sys.modules)
    try:
        importlib.import_module(module)
        result = [name for name in watched if name in sys.modules and name not in before]
    except ImportError as error:
        result = [f"{type(error).__name__}: {error}"]
    print(json.dumps([module, result]), flush=True)
    if module in apart:
        os._exit(0)
"""


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imported(modules: list[str], watched: list[str], apart: Iterable[str] = (), path: str = "") -> dict[str, list[str]]:
    """{module: those of `watched` that its import loads, or its error}; imported in this order in one process.

    apart: modules that are imported in a fork of it. path: a folder of packages for all others.
    """
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS, json.dumps([modules, watched, [*apart], path])]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent, env=environment)
    found = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["megarl'))
    assert list(found) == modules, result.stdout + result.stderr
    return found


def test_command_line_recipe_and_storage_load_no_torch() -> None:
    watched = ["torch", *HEAVY]
    assert imported(WITHOUT_TORCH, watched) == {module: [] for module in WITHOUT_TORCH}


def test_imports_load_heavy_packages_only_where_allowed(tmp_path: Path) -> None:
    """The module of each engine is imported in a process of its own, and all others in another one.

    These must not ask for GPUs, as flashinfer does, which vLLM brings along and Megatron imports if it is there:
    processes choose their GPUs later.
    """
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('it asks for all GPUs')")
    allowed = {module: [name for name in HEAVY if within(module, HEAVY[name])] for module in MODULES}
    modules = sorted(MODULES, key=lambda module: (len(allowed[module]), "megatron" in allowed[module]))
    engines = [engine.module for engine in ENGINES.values()]
    found = imported(modules, list(HEAVY), engines, str(tmp_path))
    for names in allowed.values():  # an engine may not be installed
        names += [f"ModuleNotFoundError: No module named {name!r}" for name in names]
    assert [(module, names) for module, names in found.items() if not set(names) <= set(allowed[module])] == []


@functools.cache
def statements(module: str) -> list[str]:
    """Everything that `module` imports anywhere in its source, also lazily or only for type checkers."""
    path = PACKAGE.parent / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return named_in(source.read_text())


def test_import_statements_of_heavy_packages_are_only_where_allowed() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in statements(module)
        if (heavy := name.split(".")[0]) in HEAVY and not within(module, IMPORTERS[heavy])
    ]
    assert wrong == []


def folder(module: str) -> str:
    """The folder or top-level module of megarl/ that ``module`` belongs to; "" for the package itself."""
    return [*module.split("."), ""][1]


def goes_up(module: str, name: str) -> bool:
    """Whether an import is one of a higher room, or of another of ``APART``."""
    height = {place: list(ROOMS).index(room) for place, room in ROOM.items()} | {"": -1}
    own, other = folder(module), folder(name)
    return height[other] > height[own] or ({own, other} <= set(APART) and own != other)


def test_imports_go_downwards() -> None:
    """Every folder and module is in one room."""
    assert sorted({folder(module) for module in MODULES} - {""}) == sorted(itertools.chain(*ROOMS.values()))
    assert goes_up("megarl.batch", "megarl.storage.files") and goes_up("megarl.actor.model", "megarl.rollout.engine")
    imports = [(module, name) for module in MODULES for name in imports_of(module)]
    assert [f"{module} imports {name}" for module, name in imports if goes_up(module, name)] == []


def imports_of(module: str) -> list[str]:
    """The modules of megarl that ``module`` imports; a name from a package's ``__init__`` counts as the package."""
    found = set()
    for name in statements(module):
        parts = name.split(".")
        prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        found.update(itertools.islice((prefix for prefix in prefixes if prefix in MODULES), 1))
    return sorted(found - {module})


def test_imports_form_no_circle() -> None:
    """Neither of modules nor of folders."""
    modules = {module: imports_of(module) for module in MODULES}
    folders: dict[str, set[str]] = {}
    for module, names in modules.items():
        folders.setdefault(folder(module), set()).update({folder(name) for name in names} - {folder(module)})
    for graph in (modules, folders):
        graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle
