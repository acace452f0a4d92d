"""Model families: what megarl knows of each Hugging Face ``model_type``. Imports neither torch nor Megatron.

A family is a file of `megarl.models.families`; the parts of which families are made are the other modules here.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from megarl.models import families
from megarl.models.family import Family

__all__ = ["FAMILIES", "REFUSALS", "Family", "families_of", "family_of"]


def families_of(package: Any) -> tuple[dict[str, Family], dict[str, str]]:
    """{``model_type``: its ``FAMILY``} and {``model_type``: its ``REFUSAL``} of all modules of a package."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = {name: vars(import_module(f"{package.__name__}.{name}")) for name in names}
    known = {name: module["FAMILY"] for name, module in modules.items() if "FAMILY" in module}
    return known, {name: module["REFUSAL"] for name, module in modules.items() if name not in known}


FAMILIES, REFUSALS = families_of(families)


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a model whose settings `megarl.models.hf_config.read_hf_config` has read."""
    return FAMILIES[hf["model_type"]]
