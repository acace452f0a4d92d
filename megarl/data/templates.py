"""From an item of a source to the text of a prompt and its tokens: ``[data]``'s templates, and the tokenizer's."""

from __future__ import annotations

import bisect
import datetime
import itertools
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.files import Item
from megarl.errors import UserError
from megarl.recipe.data_table import DataTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates such as Llama 3.2's write today's date into the prompt, so that a run would see other prompts when it is
# continued tomorrow. They see this day, which the same templates name where there is no clock.
TODAY = datetime.datetime(2024, 7, 26)


class Overlong(UserError):
    """A prompt of more than `data.max_prompt_tokens` tokens."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model sees it."""

    text: str
    tokens: tuple[int, ...]
    truncated: bool = False


_TURN = "\ufdd0turn\ufdd1"  # what the model said, where only what follows it is asked for


class Renderer:
    """``[data]`` of a recipe and a tokenizer: how an item becomes a prompt.

    Special tokens that stand in the item are text: a question about "<|im_end|>" ends nobody's turn. Those of the
    templates, which the recipe's author and the tokenizer's wrote, are tokens.
    """

    def __init__(self, table: DataTable, tokenizer: PreTrainedTokenizerBase) -> None:
        self._table, self._tokenizer = table, tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        special.sort(key=len, reverse=True)  # as the tokenizer, the longest that matches
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._fields = {re.split(r"[.\[]", name)[0] for name in _names(table.prompt_template)}
        first = tokenizer("")["input_ids"][:1]
        self._begin = first if first and first[0] == tokenizer.bos_token_id else []
        self._chat_template = _read_template(table.template_file) if table.template_file else tokenizer.chat_template
        if table.template != "raw" and not self._chat_template:
            raise UserError(
                f'data.template = "chat", but the tokenizer {tokenizer.name_or_path} has no chat template: use "raw", '
                "or a .jinja file"
            )

    def text(self, item: Item, where: str) -> str:
        """The prompt's text; ``where`` names the item in a `UserError` about a template that does not fit it."""
        question, template = item["question"], self._table.prompt_template
        if isinstance(question, str):
            filled = _fill(template, {**item["metadata"], "prompt": question}, where)
            return filled if self._table.template == "raw" else self._chat([_message("user", filled)], where)
        if self._table.template == "raw":
            raise UserError(f'{where} is a list of chat messages: set data.template = "chat", or to a .jinja file')
        if template != "{prompt}":
            raise UserError(f"{where} is a list of chat messages, with which data.prompt_template cannot be combined")
        return self._chat(question, where)

    def render(self, item: Item, where: str) -> Rendered:
        """The prompt, cut to `data.max_prompt_tokens` where it is longer and the recipe says so; else `Overlong`."""
        rendered, limit = self._whole(item, where), self._table.max_prompt_tokens
        if not rendered.tokens:
            raise UserError(f"{where} has no tokens: {rendered.text!r}")
        if len(rendered.tokens) <= limit:
            return rendered
        if self._table.overlong == "truncate":
            return self._cut(item, rendered, where)
        raise Overlong(
            f"{where} has {len(rendered.tokens)} tokens, more than data.max_prompt_tokens = {limit}: "
            f"{rendered.text[:80]!r}"
        )

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, after: int | None, where: str) -> list[int]:
        """Tokens of a conversation up to where the model speaks next; of an agent's, with its ``tools``.

        after: of messages that follow this one, which the model wrote, alone: the tokens that end its turn come first.
        Its own text is not rendered, so that nothing of it depends on the template. `UserError` for messages that the
        template does not take.
        """
        hidden = self._stand_ins(messages)
        shown = _replaced(messages, hidden)
        if after is not None:
            shown[after] = _message("assistant", _TURN)
        text = self._chat(shown, where, tools)
        if after is not None:
            if text.count(_TURN) != 1:
                raise UserError(f"the chat template does not show the turns of {where} once each, as they are")
            text = text.partition(_TURN)[2]
        return self._encode(text, {stand_in: token for token, stand_in in hidden.items()})

    def length(self, item: Item, where: str) -> int:
        """Tokens of the whole prompt."""
        return len(self._whole(item, where).tokens)

    def _whole(self, item: Item, where: str) -> Rendered:
        # of the columns, which may hold megabytes of tests, only those that are shown
        used = {name: value for name, value in item["metadata"].items() if name in self._fields}
        hidden = self._stand_ins([item["question"], used])
        question, metadata = _replaced([item["question"], used], hidden)
        text = self.text({**item, "question": question, "metadata": {**item["metadata"], **metadata}}, where)
        shown = {stand_in: token for token, stand_in in hidden.items()}
        return Rendered(_replaced(text, shown), tuple(self._encode(text, shown)))

    def _cut(self, item: Item, whole: Rendered, where: str) -> Rendered:
        """With as many characters of what the user says as there is room for."""
        limit = self._table.max_prompt_tokens

        def attempt(kept: int) -> Rendered:
            return self._whole({**item, "question": _shortened(item["question"], kept)}, where)

        kept = bisect.bisect_right(range(len(whole.text)), limit, key=lambda n: len(attempt(n).tokens)) - 1
        while kept > 0:  # a text may have fewer tokens than one that it begins with
            rendered = attempt(kept)
            if len(rendered.tokens) <= limit:
                return Rendered(rendered.text, rendered.tokens, truncated=True)
            kept -= 1
        raise Overlong(f"{where} has more than data.max_prompt_tokens = {limit} tokens without what could be cut")

    def _chat(self, messages: list[dict[str, Any]], where: str, tools: list[Any] | None = None) -> str:
        if self._table.system is not None and messages[0]["role"] != "system":
            messages = [_message("system", self._table.system), *messages]
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=TODAY.strftime,
            )
        except Exception as error:  # Jinja's, and whatever Python raises in a template that does not fit
            raise UserError(f"the chat template does not fit {where}: {type(error).__name__}: {error}") from error
        return str(text)

    def _stand_ins(self, shown: list[Any]) -> dict[str, str]:
        """Special tokens that ``shown`` spells out -> texts that no tokenizer knows, to hide them behind."""
        if self._table.allow_special:
            return {}
        texts = list(_texts(shown))
        found = sorted({token for text in texts for token in self._special.findall(text)}, key=len, reverse=True)
        if not found:
            return {}
        everything = "".join(texts)
        unused = (f"\ufdd0{n}\ufdd1" for n in itertools.count())
        return dict(zip(found, (text for text in unused if text not in everything), strict=False))

    def _encode(self, text: str, shown: dict[str, str]) -> list[int]:
        """Tokens of ``text``, with those that stand-ins hide as text."""
        if not shown:
            return self._with_begin(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens: list[int] = []
        # between two special tokens nothing depends on what is beyond them, so these stretches are encoded alone
        for stretch in re.split(f"({self._special.pattern})", text):
            spelled = _replaced(stretch, shown)
            plain = {"split_special_tokens": True} if spelled != stretch else {}
            tokens += self._tokenizer(spelled, add_special_tokens=False, **plain)["input_ids"] if spelled else []
        return self._with_begin(tokens)

    def _with_begin(self, tokens: list[int]) -> list[int]:
        """A chat template has written its own beginning-of-sequence token, or wants none."""
        raw = self._table.template == "raw" and tokens and tokens[:1] != self._begin
        return [*self._begin, *tokens] if raw else tokens


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read data.template {path}: {error}") from error


def _names(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return []  # `_fill` says what is wrong with it


def _fill(template: str, fields: dict[str, Any], where: str) -> str:
    try:
        return template.format(**fields)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"data.prompt_template {template!r} does not fit {where} ({error}); known fields are "
            + ", ".join("{" + name + "}" for name in sorted(fields))
        ) from error


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _replaced(value: Any, new: dict[str, str]) -> Any:
    """``value`` with the keys of ``new`` replaced in all its texts."""
    if not new:
        return value
    if isinstance(value, str):
        for old in new:
            value = value.replace(old, new[old])
        return value
    if isinstance(value, dict):
        return {key: _replaced(part, new) for key, part in value.items()}
    return [_replaced(part, new) for part in value] if isinstance(value, list) else value


def _shortened(question: Any, kept: int) -> Any:
    """The first ``kept`` characters of a text, or of the last message of the user's in a chat."""
    if isinstance(question, str):
        return question[:kept]
    for number, message in reversed(list(enumerate(question))):
        if message["role"] == "user" and isinstance(message["content"], str):
            return [*question[:number], {**message, "content": message["content"][:kept]}, *question[number + 1 :]]
    return question
