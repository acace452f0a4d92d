"""``[data]`` of a recipe: where prompts come from, and how a model is asked them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.recipe.base import Table

OF_A_SOURCE = ("source", "train", "options", "format", "columns")  # what each file or generator has of its own
FILES = (".jsonl", ".json", ".csv", ".parquet")  # how the names of prompt files end
MESSAGES = ("raw", "chat")  # what `DataTable.template` may be beside a file


class SourceTable(Table):
    """``[[data.sources]]``: one of several places that prompts come from."""

    source: Literal["file", "reasoning_gym"]
    train: str  # a .jsonl, .json, .csv or .parquet file; or the name of a reasoning-gym generator
    options: dict[str, Any] = Field({})  # reasoning-gym: the generator's own settings, for example { min_word_len = 3 }
    format: str | None = None  # file: a public data set as it is published, one of megarl.data.formats.FORMATS
    # file: which column is the prompt, which the answer, ..., for example { prompt = "problem", answer = "truth.0" }
    columns: dict[str, str] = Field({})
    weight: float = Field(1.0, gt=0)  # of this source's prompts among those of all

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> SourceTable:
        if self.options and self.source == "file":
            raise ValueError('data.options are settings of a reasoning-gym generator, but data.source = "file"')
        if (self.format or self.columns) and self.source != "file":
            raise ValueError('data.format and data.columns describe a file, but data.source = "reasoning_gym"')
        if self.format and self.columns:
            raise ValueError("data.format says where prompt and answer are: leave out data.columns")
        return self


class DataTable(Table):
    source: Literal["file", "reasoning_gym"] | None = None  # these five: as in `SourceTable`, where there is one
    train: str | None = None
    options: dict[str, Any] = Field({})
    format: str | None = None
    columns: dict[str, str] = Field({})
    sources: tuple[SourceTable, ...] = Field((), strict=False)  # instead of these five
    prompt_template: str = Field("{prompt}", max_length=1_000_000)  # what the user says, of a prompt that is a text
    # raw: that text alone; chat: in the tokenizer's chat template; FILE.jinja: in this chat template
    template: str = "raw"
    system: str | None = Field(None, min_length=1, max_length=1_000_000)  # of chats without a system message
    allow_special: bool = False  # special tokens that a prompt spells out are tokens; else they are text
    max_prompt_tokens: int = Field(1024, ge=1, le=10**9)  # tokens, all markup included
    overlong: Literal["error", "drop", "truncate"] = "error"  # what becomes of longer prompts

    @property
    def mixture(self) -> tuple[SourceTable, ...]:
        """All sources, one or more."""
        if self.sources:
            return self.sources
        assert self.source is not None and self.train is not None
        own = {name: getattr(self, name) for name in OF_A_SOURCE}
        return (SourceTable.model_validate(own),)

    @property
    def files(self) -> list[str]:
        """Those of prompts."""
        return [table.train for table in self.mixture if table.source == "file"]

    @property
    def template_file(self) -> str | None:
        return None if self.template in MESSAGES else self.template

    @model_validator(mode="after")
    def _has_sources(self) -> DataTable:
        own = [name for name in OF_A_SOURCE if getattr(self, name) != DataTable.model_fields[name].default]
        if self.sources and own:
            raise ValueError(f"{own[0]} stands in each of [[data.sources]], where there are any")
        if not self.sources and not {"source", "train"} <= set(own):
            raise ValueError("source and train say where prompts come from, or each of [[data.sources]] does")
        self.mixture  # noqa: B018 - raises where the settings are not of one kind
        return self

    @model_validator(mode="after")
    def _template_is_one(self) -> DataTable:
        if self.template not in MESSAGES and not self.template.endswith(".jinja"):
            raise ValueError(f'template = {self.template!r}: expected "raw", "chat" or a file that ends in .jinja')
        if self.template == "raw" and self.system is not None:
            raise ValueError('system is a message of a chat: set template = "chat", or leave it out')
        return self
