"""``[data]`` of a recipe: where prompts come from, and how they are put to the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.recipe.base import Table

OF_A_SOURCE = ("source", "train", "options", "format", "columns")  # the keys that describe one source of prompts
FILES = (".jsonl", ".json", ".csv", ".parquet")  # suffixes of prompt files
MESSAGES = ("raw", "chat")  # the values of `DataTable.template` that are not the path of a file
GIVEN = {"messages", "tools", "add_generation_prompt", "strftime_now"}  # variables of a chat template that megarl sets


class SourceTable(Table):
    """``[[data.sources]]``: one of several sources of prompts."""

    source: Literal["file", "reasoning_gym"]  # a prompt file, or a generator of reasoning-gym
    train: str  # a .jsonl, .json, .csv or .parquet file; or the name of a reasoning-gym generator
    options: dict[str, Any] = Field({})  # reasoning-gym: the generator's own settings, for example { min_word_len = 3 }
    format: str | None = None  # file: a public data set as it is published, one of megarl.data.formats.FORMATS
    # file: the column to read each field from, for example { prompt = "problem", answer = "truth.0" }
    columns: dict[str, str] = Field({})
    weight: float = Field(1.0, gt=0)  # this source's share of the prompts is its weight over the sum of all weights

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> SourceTable:
        if self.options and self.source == "file":
            raise ValueError('data.options are settings of a reasoning-gym generator, but data.source = "file"')
        if (self.format or self.columns) and self.source != "file":
            raise ValueError('data.format and data.columns describe a file, but data.source = "reasoning_gym"')
        if self.format and self.columns:
            raise ValueError("data.format already says which columns hold prompt and answer: leave out data.columns")
        return self


class DataTable(Table):
    """``[data]``: one source of prompts, or several in ``sources``, and how prompts become tokens."""

    source: Literal["file", "reasoning_gym"] | None = None  # of a run with a single source, as in [[data.sources]]
    train: str | None = None  # the same, as the next three
    options: dict[str, Any] = Field({})  # the same
    format: str | None = None  # the same
    columns: dict[str, str] = Field({})  # the same
    sources: tuple[SourceTable, ...] = Field((), strict=False)  # several sources, instead of these five keys
    # the text of the user's message, for prompts that are plain text; prompts that are lists of messages do not use it
    prompt_template: str = Field("{prompt}", max_length=1_000_000)
    # raw: that text alone; chat: in the tokenizer's chat template; FILE.jinja: in this chat template
    template: str = "raw"
    template_arguments: dict[str, Any] = Field({})  # variables of the chat template: { enable_thinking = false }
    system: str | None = Field(None, min_length=1, max_length=1_000_000)  # system message of chats that have none
    allow_special: bool = False  # true: special tokens spelled out in a prompt are encoded as such, not as plain text
    max_prompt_tokens: int = Field(1024, ge=1, le=10**9)  # tokens, all markup included
    overlong: Literal["error", "drop"] = "error"  # what to do with longer prompts

    @property
    def mixture(self) -> tuple[SourceTable, ...]:
        """All sources, at least one."""
        if self.sources:
            return self.sources
        assert self.source is not None and self.train is not None
        own = {name: getattr(self, name) for name in OF_A_SOURCE}
        return (SourceTable.model_validate(own),)

    @property
    def files(self) -> list[str]:
        """The prompt files among the sources."""
        return [table.train for table in self.mixture if table.source == "file"]

    @property
    def template_file(self) -> str | None:
        """The path of the chat template; None if ``template`` names no file."""
        return None if self.template in MESSAGES else self.template

    @model_validator(mode="after")
    def _has_sources(self) -> DataTable:
        own = [name for name in OF_A_SOURCE if getattr(self, name) != DataTable.model_fields[name].default]
        if self.sources and own:
            raise ValueError(f"with [[data.sources]], set {own[0]} in each of them instead of in [data]")
        if not self.sources and not {"source", "train"} <= set(own):
            raise ValueError("needs source and train, or [[data.sources]], to say where prompts come from")
        self.mixture  # noqa: B018 - raises if the settings do not fit the kind of source
        return self

    @model_validator(mode="after")
    def _template_is_one(self) -> DataTable:
        if self.template not in MESSAGES and not self.template.endswith(".jinja"):
            raise ValueError(f'template = {self.template!r}: expected "raw", "chat" or a file that ends in .jinja')
        if self.template == "raw" and self.system is not None:
            raise ValueError('system is a message of a chat: set template = "chat", or leave it out')
        if self.template == "raw" and self.template_arguments:
            raise ValueError('template_arguments are for a chat template: set template = "chat", or leave them out')
        if given := self.template_arguments.keys() & GIVEN:
            raise ValueError(f"template_arguments cannot have {min(given)}, which every chat template is given")
        return self
