"""What evaluations leave in a run directory: the prompts of a suite, and every response to them with its reward.

``evaluations/NAME/prompts.jsonl`` has one object a prompt. ``evaluations/NAME/update_000096/`` is a rollout store whose
groups have the numbers of their prompts, sealed when all are answered; ``settings_000096.json`` says how they are
sampled and scored.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megarl.data.prompts import Prompt
from megarl.errors import UserError
from megarl.storage.checked_json import encode, read_checked, write_checked
from megarl.storage.files import make_directory, write_atomic
from megarl.storage.json_lines import read_json_lines
from megarl.storage.ledger import is_sealed
from megarl.storage.rollouts import Group, RolloutStore


@dataclass(frozen=True)
class Answered:
    """A suite's place in a run directory."""

    directory: Path  # evaluations/NAME

    @classmethod
    def of(cls, run: Path, suite: str) -> Self:
        """In the run directory ``run``."""
        return cls(run / "evaluations" / suite)

    @property
    def prompts(self) -> Path:
        return self.directory / "prompts.jsonl"

    def responses(self, version: int) -> Path:
        """Of the policy after so many updates."""
        return self.directory / f"update_{version:06d}"

    def begin(self, version: int, settings: dict[str, Any]) -> Path:
        """Make the place of the responses: what an interrupted evaluation stored there under other settings goes.

        settings: how responses are sampled and scored; they are kept beside the responses.
        """
        place, kept = self.responses(version), self.directory / f"settings_{version:06d}.json"
        remedy = "Delete it and start again: the responses of that evaluation are then generated anew"
        if not kept.exists() or read_checked(kept, remedy) != settings:
            if place.exists():
                shutil.rmtree(place)
            write_checked(kept, settings)
        make_directory(place)
        return place

    def versions(self) -> list[int]:
        """Updates after which the whole suite was answered."""
        found = (path for path in self.directory.glob("update_*") if is_sealed(path))
        return sorted(int(path.name.removeprefix("update_")) for path in found)

    def write_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Once; `UserError` where other prompts were asked before."""
        lines = b"".join(encode(describe(prompt)) for prompt in prompts)
        if not self.prompts.exists():
            make_directory(self.directory)
            write_atomic(self.prompts, lines)
        elif self.prompts.read_bytes() != lines:
            raise UserError(
                f"the suite has other prompts than {self.prompts} says: another tokenizer, another version of the "
                "generator, or a damaged file. Move the directory away to evaluate anew"
            )

    def read_prompts(self) -> list[dict[str, Any]]:
        """What `describe` makes of each."""
        if not self.prompts.exists():
            raise UserError(f"{self.directory} has no evaluation: {self.prompts.name} is not there")
        return read_json_lines(self.prompts)

    def read(self, version: int) -> list[Group]:
        """All groups, in the order of the prompts; `UserError` where a prompt has none, or for damage."""
        store = RolloutStore(self.responses(version))
        return store.read(range(len(self.read_prompts())))


def describe(prompt: Prompt) -> dict[str, Any]:
    """A line of prompts.jsonl: number, the row's question and answer, and the text that the model saw."""
    question = prompt.entry["question"]
    return {"prompt": prompt.index, "question": question, "answer": prompt.answer, "text": prompt.text}
