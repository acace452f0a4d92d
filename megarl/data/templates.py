"""From an item of a source to the text of a prompt: the recipe's template, or the tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.data.sources import Item
from megarl.errors import UserError
from megarl.recipe.tables import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, item: Item, where: str) -> str:
    """The text of a prompt; ``where`` names the item in a `UserError` about a template that does not fit it."""
    template, question = recipe.data.prompt_template, item["question"]
    if isinstance(question, list):
        if not tokenizer.chat_template:
            raise UserError(f"{where} is a list of chat messages, but the tokenizer has no chat template")
        if template != "{prompt}":
            raise UserError("data.prompt_template cannot be combined with chat messages")
        text: Any = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        return text
    known = {**item["metadata"], "prompt": question}
    try:
        return template.format(**known)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"data.prompt_template {template!r} does not fit {where} ({error}); known fields are "
            + ", ".join("{" + name + "}" for name in sorted(known))
        ) from error
