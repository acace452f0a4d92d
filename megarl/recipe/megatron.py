"""The tables that are passed through to Megatron-Core: checked against its source.

Megatron-Core's configuration dataclasses are parsed as text, not imported, since importing them would load torch.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megarl.errors import did_you_mean

CONFIGS = {  # table of the recipe -> (file, dataclass), base classes last
    "megatron": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "megatron_ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "megatron_optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


# of packages of which Megatron-Core may declare no versions. Transformer Engine: from the oldest of the tests to
# 2.17.1, with which Megatron's developers build 0.19 (uv.lock)
_OWN_CHOICE = {"transformer-engine": ">=2.9,<2.18"}


def suitable_versions(package: str) -> tuple[SpecifierSet, str]:
    """The versions of an optional package that suit the installed Megatron-Core: those that it declares, or megarl's
    choice, or any. Also the words in front of them in a message, which say whose they are.
    """
    core = f"Megatron-Core {importlib.metadata.version('megatron-core')}"
    asked = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or ()]
    if declared := SpecifierSet(",".join(str(one.specifier) for one in asked if one.name == package)):
        return declared, f"{core} needs"
    return SpecifierSet(_OWN_CHOICE.get(package, "")), f"megarl's own choice for {core}, which declares none, is"


@functools.cache
def fields(table: str) -> dict[str, str]:
    """{field: its type annotation in Megatron-Core's source}; empty if Megatron-Core is not installed."""
    found = importlib.util.find_spec("megatron")
    roots = [Path(root) / "core" for root in (found.submodule_search_locations or ())] if found else []
    root = next((root for root in roots if root.is_dir()), None)
    if root is None:
        return {}
    types: dict[str, str] = {}
    for file, name in CONFIGS[table]:
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        types.setdefault(field.target.id, ast.unparse(field.annotation))
    return types


def problems(table: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """One line for each setting that Megatron-Core does not have, or whose value has another type."""
    known = fields(table)
    for name, value in settings.items():
        if not known:
            return
        if name not in known:
            hint = did_you_mean(name, known)
            yield f"[{table}] {name}: Megatron-Core's {CONFIGS[table][0][1]} has no such field; {hint}"
        elif not _fits(value, known[name]):
            yield f"[{table}] {name} = {value!r}: Megatron-Core expects a value of type {known[name]}"


def _fits(value: Any, annotation: str) -> bool:
    """Whether a TOML value fits a type annotation; True for all types that are not checked, such as unions."""
    kind = annotation.removeprefix("Optional[").removesuffix("]") if annotation.startswith("Optional[") else annotation
    if kind.startswith("Literal["):
        return value in ast.literal_eval(f"({kind[len('Literal[') : -1]},)")
    if kind not in _TYPES:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


_BIAS_UPDATE_RATE = 1e-3  # Megatron's default; only routers with a bias have one that moves


def shares_prompts(settings: Mapping[str, Any]) -> bool:
    """Whether a micro-batch can hold a prompt once for all its responses, with the result of whole sequences.

    settings: of Megatron's TransformerConfig, from the model's family and ``[megatron]``. False for layers with a
    recurrent state, which would have to fork it, and where routers' biases move with the number of their tokens.
    """
    biased = settings.get("moe_router_enable_expert_bias", False)
    moves = biased and settings.get("moe_router_bias_update_rate", _BIAS_UPDATE_RATE) != 0
    return not (moves or settings.get("linear_attention_freq"))
