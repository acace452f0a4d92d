"""Model families: what megarl knows of each Hugging Face ``model_type``. Imports neither torch nor Megatron.

A family is a file of `megarl.models.families`; the parts of which families are made are the other modules here.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from megarl.models import families
from megarl.models.family import Family

__all__ = ["FAMILIES", "Family", "families_of", "family_of"]


def families_of(package: Any) -> dict[str, Family]:
    """{``model_type``: the ``FAMILY`` of the module of that name} of all modules of a package."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: import_module(f"{package.__name__}.{name}").FAMILY for name in names}


FAMILIES = families_of(families)


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a model whose settings `megarl.models.hf_config.read_hf_config` has read."""
    return FAMILIES[hf["model_type"]]
