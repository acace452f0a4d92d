"""`megarl data show`: prints prompts of a recipe as the model sees them."""

from __future__ import annotations

from typing import Any

from megarl.data.prompts import Prompt, open_prompts
from megarl.recipe.tables import Recipe


def show_prompts(recipe: Recipe, count: int) -> str:
    """The first ``count`` training prompts and as many held-out ones, each with its text and all tokens."""
    tokenizer, prompts = open_prompts(recipe, recipe.model.tokenizer_path)
    shown = [(f"training prompt {n}", prompts.train(n)) for n in range(count)]
    shown += [(f"held-out prompt {prompt.index}", prompt) for prompt in prompts.heldout()[:count]]
    return "\n\n".join(_describe(name, prompt, tokenizer) for name, prompt in shown)


def _describe(name: str, prompt: Prompt, tokenizer: Any) -> str:
    cut = ", cut" if prompt.truncated else ""
    tokens = " ".join(f"{token} {tokenizer.decode([token])!r}" for token in prompt.tokens)
    return (
        f"--- {name}: {len(prompt.tokens)} tokens{cut}, answer {prompt.answer!r}\n{prompt.text}\n"
        f"--- its tokens\n{tokens}"
    )
