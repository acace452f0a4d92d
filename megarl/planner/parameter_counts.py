"""How many parameters each rank of a layout has, as Megatron builds the model (`megarl.actor.parameter_counts`)."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from megarl.errors import UserError
from megarl.recipe.layout import PARALLEL, Layout
from megarl.recipe.load import override_recipe
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class StageParameters:
    """Parameters on the fullest rank of a pipeline stage."""

    layers: int
    dense: int
    expert: int
    dense_adapters: int = 0  # parameters of ``[actor.lora]``, in addition to the weights, which are then frozen
    expert_adapters: int = 0

    @property
    def adapters(self) -> int:
        return self.dense_adapters + self.expert_adapters

    @property
    def trained_dense(self) -> int:
        """Parameters outside experts that have gradients and an optimizer."""
        return self.dense_adapters if self.adapters else self.dense

    @property
    def trained_expert(self) -> int:
        return self.expert_adapters if self.adapters else self.expert

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_expert


class ParameterCounter:
    """Counts in a process of its own, since that patches Megatron; the process ends with the context."""

    def __enter__(self) -> ParameterCounter:
        self._counted: dict[str, list[StageParameters]] = {}
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _be_quiet)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()

    def count(self, hf: dict[str, Any], recipe: Recipe, ranks: int) -> list[StageParameters]:
        """Parameters of each pipeline stage; `UserError` if Megatron-Core cannot build the layout."""
        layout = asdict(Layout.of(recipe, ranks))
        adapters = recipe.actor.lora and recipe.actor.lora.model_dump()
        asked = json.dumps([hf, layout, recipe.megatron, adapters])  # everything on which the numbers depend
        if asked not in self._counted:
            try:
                stages = self._process.submit(_count, hf, recipe, ranks).result()
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"Megatron-Core cannot build this layout: {type(error).__name__}: {error}") from error
            self._counted[asked] = [StageParameters(**stage) for stage in stages]
        return self._counted[asked]

    def whole(self, hf: dict[str, Any], recipe: Recipe) -> StageParameters:
        """All parameters of the model, on one rank."""
        one = [f"actor.{name}=1" for name in PARALLEL]
        plain = recipe.model_copy(update={"megatron": {}})
        return self.count(hf, override_recipe(plain, one), 1)[0]


def _be_quiet() -> None:
    """In the counting process: no output, since Megatron prints, and no report of Ctrl-C, which ends the plan."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _count(hf: dict[str, Any], recipe: Recipe, ranks: int) -> list[dict[str, Any]]:
    from megarl.actor.parameter_counts import count_parameters

    return count_parameters(hf, recipe, ranks)
