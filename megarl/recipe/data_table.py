"""``[data]`` of a recipe: where prompts come from, and how a model is asked them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.recipe.base import Table

MESSAGES = ("raw", "chat")  # what `DataTable.template` may be beside a file


class DataTable(Table):
    source: Literal["file", "reasoning_gym"]
    train: str  # a .jsonl / .parquet file with columns prompt, answer; or the name of a reasoning-gym generator
    options: dict[str, Any] = Field({})  # reasoning-gym: the generator's own settings, for example { min_word_len = 3 }
    prompt_template: str = Field("{prompt}", max_length=1_000_000)  # what the user says, of a prompt that is a text
    # raw: that text alone; chat: in the tokenizer's chat template; FILE.jinja: in this chat template
    template: str = "raw"
    system: str | None = Field(None, min_length=1, max_length=1_000_000)  # of chats without a system message
    allow_special: bool = False  # special tokens that a prompt spells out are tokens; else they are text
    max_prompt_tokens: int = Field(1024, ge=1, le=10**9)  # tokens, all markup included
    overlong: Literal["error", "drop", "truncate"] = "error"  # what becomes of longer prompts

    @property
    def template_file(self) -> str | None:
        return None if self.template in MESSAGES else self.template

    @model_validator(mode="after")
    def _template_is_one(self) -> DataTable:
        if self.template not in MESSAGES and not self.template.endswith(".jinja"):
            raise ValueError(f'template = {self.template!r}: expected "raw", "chat" or a file that ends in .jinja')
        if self.template == "raw" and self.system is not None:
            raise ValueError('system is a message of a chat: set template = "chat", or leave it out')
        return self
