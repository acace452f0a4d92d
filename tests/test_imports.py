"""Which module may import what: heavy packages only where they are needed, and megarl's modules only lower rooms."""

from __future__ import annotations

import functools
import graphlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
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

# prints, for each group of modules, those of the watched packages that are loaded after its import
IMPORTS = """
import importlib, json, sys
groups, watched = map(json.loads, sys.argv[1:])
for modules in groups:
    for module in modules:
        importlib.import_module(module)
    print(json.dumps([name for name in watched if name in sys.modules]), flush=True)
"""


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_imports_load_heavy_packages_only_where_allowed(tmp_path: Path) -> None:
    """Modules are imported in groups, those that may load the fewest packages first; engines' need not be installed.

    None may ask for GPUs, as flashinfer does, which vLLM brings along and Megatron imports if it is there: processes
    choose their GPUs later.
    """
    groups: dict[tuple[str, ...], list[str]] = {(): [*WITHOUT_TORCH]}
    for module in MODULES:
        if module not in WITHOUT_TORCH and not any(within(module, HEAVY[name]) for name in ENGINES):
            heavy = ("megatron", "transformers")
            groups.setdefault(("torch", *(name for name in heavy if within(module, HEAVY[name]))), []).append(module)
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('it asks for all GPUs')")
    order = sorted(groups, key=lambda names: (len(names), "megatron" in names))
    asked = json.dumps([groups[names] for names in order]), json.dumps(["torch", *HEAVY])
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS, *asked]
    environment = os.environ | {"PYTHONPATH": f"{PACKAGE.parent}:{tmp_path}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent, env=environment)
    loaded = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(loaded) == len(groups), done.stdout + done.stderr
    for group, names, allowed in zip(order, loaded, itertools.accumulate(map(set, order), set.union), strict=True):
        assert set(names) <= allowed, groups[group]


@functools.cache
def statements(module: str) -> list[str]:
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
    modules = {module: imports_of(module) for module in MODULES}
    folders: dict[str, set[str]] = {}
    for module, names in modules.items():
        folders.setdefault(folder(module), set()).update({folder(name) for name in names} - {folder(module)})
    for graph in (modules, folders):
        graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle
