"""Parameters of each rank of a layout; `megarl.actor.parameter_counts` counts them in a process with Megatron."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import IO, Any

from megarl.errors import UserError
from megarl.recipe.layout import Layout
from megarl.recipe.load import dump_recipe, override_recipe
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class StageParameters:
    """Parameters on the fullest rank of a pipeline stage, as Megatron builds it (`megarl.actor.parameter_counts`)."""

    layers: int
    dense: int
    expert: int
    dense_layers: int = 0  # of ``layers``, those without experts in a model that has experts in other layers
    linear_layers: int = 0  # of ``layers``, those that have a state instead of keys and values
    dense_adapters: int = 0  # parameters of ``[actor.lora]``, in addition to the weights, which are then frozen
    expert_adapters: int = 0
    matrices: int = 0  # of ``dense``, those in matrices of layers, without routers

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
    """Runs `megarl.actor.parameter_counts` as a separate process, which ends with the context."""

    def __enter__(self) -> ParameterCounter:
        self._counted: dict[str, list[StageParameters]] = {}
        self._errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-W", "ignore", "-m", "megarl.actor.parameter_counts"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def count(self, hf: dict[str, Any], recipe: Recipe, ranks: int) -> list[StageParameters]:
        """Parameters of each pipeline stage; `UserError` if Megatron-Core cannot build the layout."""
        layout = asdict(Layout.of(recipe, ranks))
        adapters = recipe.actor.lora and recipe.actor.lora.model_dump()
        asked = json.dumps([hf, layout, recipe.megatron, adapters])  # everything on which the numbers depend
        if asked not in self._counted:
            self._counted[asked] = self._count(hf, recipe, ranks)
        return self._counted[asked]

    def _count(self, hf: dict[str, Any], recipe: Recipe, ranks: int) -> list[StageParameters]:
        question, answer = self._process.stdin, self._process.stdout
        assert question is not None and answer is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its stderr, reported below, says why
            question.write(json.dumps({"hf": hf, "recipe": dump_recipe(recipe), "ranks": ranks}) + "\n")
            question.flush()
        line = answer.readline()
        if not line:
            raise UserError(f"Megatron-Core cannot build this layout: {_last_line(self._errors)}")
        return [StageParameters(**stage) for stage in json.loads(line)]

    def whole(self, hf: dict[str, Any], recipe: Recipe) -> StageParameters:
        """All parameters of the model, on one rank."""
        one = [f"actor.{kind}_parallel=1" for kind in ("tensor", "pipeline", "context", "expert", "expert_tensor")]
        plain = recipe.model_copy(update={"megatron": {}})
        return self.count(hf, override_recipe(plain, one), 1)[0]


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    return ([line for line in errors.read().splitlines() if line.strip()] or ["its process ended"])[-1]
