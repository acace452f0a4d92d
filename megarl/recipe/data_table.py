"""``[data]`` of a recipe: where prompts come from, and how a model is asked them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.recipe.base import Table


class DataTable(Table):
    source: Literal["file", "reasoning_gym"]
    train: str  # a .jsonl / .parquet file with columns prompt, answer; or the name of a reasoning-gym generator
    options: dict[str, Any] = Field({})  # reasoning-gym: the generator's own settings, for example { min_word_len = 3 }
    prompt_template: str = Field("{prompt}", max_length=1_000_000)
    max_prompt_tokens: int = Field(1024, ge=1, le=10**9)  # tokens; longer prompts are an error that names the prompt
