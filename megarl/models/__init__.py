"""Model families: what megarl knows about each Hugging Face ``model_type``. Imports neither torch nor Megatron.

Each file of `megarl.models.families` defines one family from the building blocks in the other modules of this package.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from megarl.models import families
from megarl.models.family import Family

__all__ = ["FAMILIES", "Family", "families_of", "family_of"]


def families_of(package: Any) -> dict[str, Family]:
    """{``model_type``: family} for a package whose modules are named as a ``model_type`` and have a ``FAMILY``."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: import_module(f"{package.__name__}.{name}").FAMILY for name in names}


FAMILIES = families_of(families)


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a model; ``hf``: its settings, from `megarl.models.hf_config.read_hf_config`."""
    return FAMILIES[hf["model_type"]]
