"""``[reward]`` of a recipe: who says what is right, and what a reward is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megarl.recipe.base import Table, one_of
from megarl.recipe.names import VERIFIERS

VerifierKind = Annotated[str, one_of(VERIFIERS)]


class RewardPart(Table):
    """``[[reward.parts]]``: what a response gets beside 1 for being right."""

    # 1 for a \boxed{}; DAPO's penalty of 0 to -1; length among the group's, 0.5 to -0.5; a function of the user's
    kind: Literal["box", "overlong", "length", "python"]
    weight: float
    buffer: int | None = Field(None, ge=1)  # overlong: tokens before rollout.max_response_tokens in which it grows
    path: str | None = None  # python: FILE.py:FUNCTION

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> RewardPart:
        for name, kind in (("buffer", "overlong"), ("path", "python")):
            if (getattr(self, name) is not None) != (self.kind == kind):
                raise ValueError(f"kind = {self.kind!r} {'needs' if self.kind == kind else 'has no'} {name}")
        _check_function(self.path)
        return self


def _check_function(path: str | None) -> None:
    file, _, name = (path or "f.py:f").rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"path = {path!r}: expected FILE.py:FUNCTION")


class ServiceTable(Table):
    """``[reward.service]``: the server that kind = "judge" or "http" asks."""

    url: str  # judge: an OpenAI-compatible server's, as "http://judge:8000/v1"; http: where questions are posted
    model: str | None = None  # judge: as the server calls it
    prompt: Path | None = Field(None, strict=False)  # judge: a file with {prompt}, {answer} and {response}
    api_key: str | None = None  # name of the environment variable that has it
    seconds: float = Field(120.0, gt=0, le=86400)  # until a request counts as unanswered
    attempts: int = Field(4, ge=1, le=20)  # of a request, with pauses of 1, 2, 4, .. seconds
    at_once: int = Field(16, ge=1, le=512)  # requests under way, of each engine replica


class RewardTable(Table):
    kind: VerifierKind
    correct_above: float = Field(0.999, gt=0, le=1)  # a verifier's score at or above this is reward 1, else 0
    require_stop: bool = True  # a response cut off by the token limit scores 0
    boxed: bool = False  # kind = "math": a response without \boxed{} is wrong; else its answer is looked for
    path: str | None = None  # kind = "python": FILE.py:FUNCTION, which takes (prompt, response, row)
    group: bool = False  # kind = "python": it takes (prompt, responses, row), all responses to a prompt together
    partial_credit: bool = False  # the reward is the verifier's score, instead of 1 or 0
    weight: float = 1.0  # of what the verifier gives, beside the parts
    parts: tuple[RewardPart, ...] = Field((), strict=False)  # what the reward has beside
    service: ServiceTable | None = None  # kind = "judge" and "http"
    # of kind = "code" alone:
    language: Literal["python", "cpp"] = "python"  # of programs, where a row has no column "language"
    seconds: int = Field(6, ge=1, le=600)  # processor time of a program on one test
    memory_mb: int = Field(1024, ge=64, le=1 << 20)  # MiB of a program's address space

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> RewardTable:
        _check_function(self.path)
        if self.kind == "python" and self.path is None:
            raise ValueError('kind = "python" needs path: FILE.py:FUNCTION')
        if (self.service is not None) != (self.kind in ("judge", "http")):
            raise ValueError('kind = "judge" and "http" need [reward.service], and no other kind has it')
        if self.service and (self.service.model is not None) != (self.kind == "judge"):
            raise ValueError('kind = "judge" needs service.model, and kind = "http" has none')
        if self.service and self.service.prompt and self.kind == "http":
            raise ValueError('service.prompt is a setting of kind = "judge"')
        kinds = {"boxed": "math", "path": "python", "group": "python"}
        kinds |= dict.fromkeys(("language", "seconds", "memory_mb"), "code")
        for name, kind in kinds.items():
            if kind != self.kind and getattr(self, name) != RewardTable.model_fields[name].default:
                raise ValueError(f"{name} is a setting of kind = {kind!r}: leave it out, or set kind")
        return self
