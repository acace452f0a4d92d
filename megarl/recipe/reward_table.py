"""``[reward]`` of a recipe: which verifier scores responses, and how the reward is computed from its score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megarl.own_file import is_own
from megarl.recipe.base import Table, one_of
from megarl.recipe.names import VERIFIERS

VerifierKind = Annotated[str, one_of(VERIFIERS)]


class RewardPart(Table):
    """``[[reward.parts]]``: a term that is added to the verifier's reward."""

    # box: 1 if there is a \boxed{}; overlong: DAPO's length penalty, 0 to -1; length: from 0.5 for the shortest
    # response of the group to -0.5 for the longest; python: a function of the user's
    kind: Literal["box", "overlong", "length", "python"]
    weight: float  # factor of the term
    # overlong: the penalty grows over this many tokens, up to rollout.max_response_tokens
    buffer: int | None = Field(None, ge=1)
    path: str | None = None  # python: FILE.py:FUNCTION

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> RewardPart:
        for name, kind in (("buffer", "overlong"), ("path", "python")):
            if (getattr(self, name) is not None) != (self.kind == kind):
                raise ValueError(f"kind = {self.kind!r} {'needs' if self.kind == kind else 'has no'} {name}")
        _check_function(self.path)
        return self


def _check_function(path: str | None) -> None:
    if path is not None and not is_own(path):
        raise ValueError(f"path = {path!r}: expected FILE.py:FUNCTION")


class ServiceTable(Table):
    """``[reward.service]``: the server that scores responses for kind = "judge" or "http"."""

    # judge: base URL of an OpenAI-compatible server, such as "http://judge:8000/v1"; http: receives the POST requests
    url: str
    model: str | None = None  # judge: the server's name for the model
    prompt: Path | None = Field(None, strict=False)  # judge: prompt file with {prompt}, {answer} and {response} in it
    api_key: str | None = None  # name of the environment variable that holds the key
    seconds: float = Field(120.0, gt=0, le=86400)  # timeout of a request
    attempts: int = Field(4, ge=1, le=20)  # tries of a request, with pauses of 1, 2, 4, .. seconds between them
    at_once: int = Field(16, ge=1, le=512)  # concurrent requests of each engine replica


class RewardTable(Table):
    """``[reward]``: the verifier and its settings, and the other parts of the reward."""

    kind: VerifierKind  # what scores a response: docs/data_and_rewards.md
    correct_above: float = Field(0.999, gt=0)  # the reward is 1 if the verifier's score is at least this, else 0
    require_stop: bool = True  # a response cut off by the token limit or by time scores 0
    boxed: bool = False  # kind = "math": true: an answer counts only in \boxed{}; false: it is searched for elsewhere
    path: str | None = None  # kind = "python": FILE.py:FUNCTION, which takes (prompt, response, row)
    group: bool = False  # kind = "python": it takes (prompt, responses, row), all responses to a prompt together
    # kind = "python" and "http": the least and the largest score that the function or service may return
    scores: tuple[float, float] = Field((0.0, 1.0), strict=False)
    partial_credit: bool = False  # the reward is the verifier's score itself, instead of 1 or 0
    weight: float = 1.0  # of the verifier's reward in the sum with ``parts``
    parts: tuple[RewardPart, ...] = Field((), strict=False)  # terms added to the verifier's reward
    service: ServiceTable | None = None  # kind = "judge" and "http"
    # for kind = "code" only:
    language: Literal["python", "cpp"] = "python"  # of programs, unless a row has a column "language"
    seconds: int = Field(6, ge=1, le=600)  # CPU seconds of a program on one test
    memory_mb: int = Field(1024, ge=64, le=1 << 20)  # MiB of a program's address space

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> RewardTable:
        _check_function(self.path)
        if self.kind == "python" and self.path is None:
            raise ValueError('kind = "python" needs path: FILE.py:FUNCTION')
        if (self.service is not None) != (self.kind in ("judge", "http")):
            raise ValueError('kind = "judge" and kind = "http" need [reward.service]; other kinds do not have it')
        if self.service and (self.service.model is not None) != (self.kind == "judge"):
            raise ValueError('kind = "judge" needs service.model; kind = "http" does not have it')
        if self.service and self.service.prompt and self.kind == "http":
            raise ValueError('service.prompt is a setting of kind = "judge"')
        if self.scores != (0.0, 1.0) and (self.kind not in ("python", "http") or self.scores[0] >= self.scores[1]):
            raise ValueError(
                f'scores = {list(self.scores)}: the least and the largest score of kind = "python" or "http"; other '
                "kinds have 0 to 1"
            )
        if self.correct_above > self.scores[1]:
            raise ValueError(f"correct_above = {self.correct_above} is more than the largest score, {self.scores[1]:g}")
        kinds = {"boxed": "math", "path": "python", "group": "python"}
        kinds |= dict.fromkeys(("language", "seconds", "memory_mb"), "code")
        for name, kind in kinds.items():
            if kind != self.kind and getattr(self, name) != RewardTable.model_fields[name].default:
                raise ValueError(f"{name} is a setting of kind = {kind!r}: leave it out, or set kind")
        return self
