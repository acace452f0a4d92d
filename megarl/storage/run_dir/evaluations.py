"""Evaluations in a run directory: the prompts of each suite, and every policy's responses to them with their rewards.

``evaluations/NAME/prompts.jsonl`` has one object per prompt of the suite NAME. ``evaluations/NAME/update_000096/`` is a
rollout store with the responses of the policy after 96 updates; its group ids are the prompts' numbers, and it is
sealed when all prompts are answered. ``settings_000096.json`` says how these responses are sampled and scored.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megarl.data.prompts import Prompt
from megarl.errors import UserError
from megarl.storage.checked_json import encode, read_checked, read_json_lines, write_checked
from megarl.storage.files import make_directory, write_atomic
from megarl.storage.ledger import is_sealed
from megarl.storage.rollouts import Group, RolloutStore


@dataclass(frozen=True)
class SuiteResponses:
    """The prompts of a suite and the responses to them, in a run directory."""

    directory: Path  # evaluations/NAME

    @classmethod
    def of(cls, run: Path, suite: str) -> Self:
        """The suite of this name in the run directory ``run``."""
        return cls(run / "evaluations" / suite)

    @property
    def prompts(self) -> Path:
        return self.directory / "prompts.jsonl"

    def responses(self, version: int) -> Path:
        """The rollout store of the policy after ``version`` updates."""
        return self.directory / f"update_{version:06d}"

    def begin(self, version: int, settings: dict[str, Any]) -> Path:
        """Make the directory for the responses of a policy and return it.

        settings: how responses are sampled and scored; stored beside the responses. If an interrupted evaluation had
        other settings, its responses are deleted.
        """
        responses, settings_file = self.responses(version), self.directory / f"settings_{version:06d}.json"
        remedy = "Delete it and start again: the responses of that evaluation are then generated again"
        if not settings_file.exists() or read_checked(settings_file, remedy) != settings:
            if responses.exists():
                shutil.rmtree(responses)
            write_checked(settings_file, settings)
        make_directory(responses)
        return responses

    def settings(self, version: int) -> dict[str, Any]:
        """How one policy's responses are sampled and scored; {} if that is not known."""
        file = self.directory / f"settings_{version:06d}.json"
        return read_checked(file, "Restore it from a copy") if file.exists() else {}

    def versions(self) -> list[int]:
        """The versions (numbers of updates) whose policies have answered the whole suite."""
        found = (path for path in self.directory.glob("update_*") if is_sealed(path))
        return sorted(int(path.name.removeprefix("update_")) for path in found)

    def write_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Write the suite's prompts unless they are written already; `UserError` if those differ."""
        lines = b"".join(encode(describe(prompt)) for prompt in prompts)
        if not self.prompts.exists():
            make_directory(self.directory)
            write_atomic(self.prompts, lines)
        elif self.prompts.read_bytes() != lines:
            raise UserError(
                f"the suite's prompts differ from those in {self.prompts}: the tokenizer or the generator's version "
                "has changed, or the file is damaged. Move the directory away to start the evaluation again"
            )

    def read_prompts(self) -> list[dict[str, Any]]:
        """The prompts, as `describe` encodes them; `UserError` if there was no evaluation or the file is damaged."""
        if not self.prompts.exists():
            raise UserError(f"{self.directory} has no evaluation: {self.prompts.name} does not exist")
        return read_json_lines(self.prompts)

    def read(self, version: int) -> list[Group]:
        """One policy's groups in the order of the prompts; `UserError` if one is missing or the store is damaged."""
        store = RolloutStore(self.responses(version))
        return store.read(range(len(self.read_prompts())))


def describe(prompt: Prompt) -> dict[str, Any]:
    """A line of prompts.jsonl: number, the row's question and answer, and the text that the model saw."""
    question = prompt.entry["question"]
    return {"prompt": prompt.index, "question": question, "answer": prompt.answer, "text": prompt.text}
