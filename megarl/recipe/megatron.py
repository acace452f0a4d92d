"""Checks ``[megatron]``, ``[megatron_ddp]`` and ``[megatron_optimizer]`` against Megatron-Core's source.

Its configuration dataclasses are parsed as text, not imported, since importing them would load torch.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import nearest

CONFIGS = {  # table of the recipe -> (file, dataclass), base classes last
    "megatron": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "megatron_ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "megatron_optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
DTYPES = ("float32", "bfloat16", "float16", "uint8")  # the names for a torch.dtype in a recipe
_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


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
            close = nearest(name, known)
            hint = f"; did you mean {close!r}?" if close else ""
            yield f"[{table}] {name}: Megatron-Core's {CONFIGS[table][0][1]} has no such field{hint}"
        elif not _fits(value, known[name]):
            yield f"[{table}] {name} = {value!r}: Megatron-Core expects a value of type {known[name]}"


def _fits(value: Any, annotation: str) -> bool:
    """Whether a TOML value fits a type annotation; True for all types that are not checked, such as unions."""
    kind = annotation.removeprefix("Optional[").removesuffix("]") if annotation.startswith("Optional[") else annotation
    if kind == "torch.dtype":
        return value in DTYPES
    if kind.startswith("Literal["):
        return value in ast.literal_eval(f"({kind[len('Literal[') : -1]},)")
    if kind not in _TYPES:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
