"""Renders an item of a source as a prompt's text and tokens, with the templates of ``[data]`` and the tokenizer."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import re
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from megarl.data.files import Item
from megarl.data.values import check_exact, leaves, name_of, tools_of, without_null
from megarl.errors import UserError
from megarl.recipe.data_table import GIVEN, DataTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chat templates such as Llama 3.2's write today's date into the prompt, so a run that is resumed on another day would
# see other prompts. They always get this day, which is these templates' own default if no clock is available.
TODAY = datetime.datetime(2024, 7, 26)


class Overlong(UserError):
    """A prompt of more than `data.max_prompt_tokens` tokens."""


_TURN = "\ufdd0turn\ufdd1"  # stands for a turn of the model, of which `Renderer.chat` wants only what follows
_END = "\ufdd0end\ufdd1"  # the end of a message that the model is to continue
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag, which Jinja does not know


class Renderer:
    """Turns items into prompts, by the ``[data]`` table of a recipe and a tokenizer.

    Special tokens that an item spells out are encoded as plain text, so that a question about "<|im_end|>" ends no turn
    (unless ``allow_special``). Those of the templates are encoded as special tokens.
    """

    def __init__(self, table: DataTable, tokenizer: PreTrainedTokenizerBase) -> None:
        self._table, self._tokenizer = table, tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        special.sort(key=len, reverse=True)  # the longest match wins, as in the tokenizer
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._fields = {re.split(r"[.\[]", name)[0] for name in _names(table.prompt_template)}
        first = tokenizer("")["input_ids"][:1]
        self._begin = first if first and first[0] == tokenizer.bos_token_id else []
        # None: the tokenizer's own, which may have several and then chooses one by whether there are tools
        self._chat_template = _read_template(table.template_file) if table.template_file else None
        if table.template == "chat" and not tokenizer.chat_template:
            raise UserError(
                f'data.template = "chat", but the tokenizer {tokenizer.name_or_path} has no chat template: use "raw", '
                "or a .jinja file"
            )
        self._complete: set[object] = set()  # shapes of conversations whose messages the template is known to show
        for name in table.template_arguments:  # one that occurs nowhere would silently be ignored
            if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template(self._chat_template)):
                raise UserError(f"data.template_arguments has {name}, which the chat template does not use")

    @functools.cached_property
    def shown(self) -> set[str]:
        """The columns of a row that reach its prompt, if it has them: those of `data.prompt_template`, ``system``, and
        the variables of the chat template, such as ``tools`` and ``documents``."""
        if self._table.template == "raw":
            return self._fields
        variables: set[str] = set()
        tools: list[Any] | None
        for tools in (None, [{}]):  # the template for conversations with tools may be another
            with contextlib.suppress(TemplateError):  # `_chat` reports it
                text = self._tokenizer.get_chat_template(self._chat_template, tools)
                tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", text))
                variables |= meta.find_undeclared_variables(tree)
        variables -= {*GIVEN, *self._tokenizer.special_tokens_map, "raise_exception"} - {"tools"}
        return self._fields | variables | {"system"}

    def text(self, item: Item, where: str) -> str:
        """The prompt's text; `UserError`, which names the item by ``where``, if the template does not fit it."""
        question, template = item["question"], self._table.prompt_template
        if isinstance(question, str):
            filled = _fill(template, {**item["metadata"], "prompt": question}, where)
            raw = self._table.template == "raw"
            return filled if raw else self._prompt([{"role": "user", "content": filled}], item["metadata"], where)
        if self._table.template == "raw":
            raise UserError(f'{where} is a list of chat messages: set data.template to "chat" or to a .jinja file')
        if template != "{prompt}":
            raise UserError(
                f"{where} is a list of chat messages, which cannot be combined with data.prompt_template: leave it out"
            )
        return self._prompt(question, item["metadata"], where)

    def render(self, item: Item, where: str) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and tokens; `Overlong` if it is longer than `data.max_prompt_tokens`."""
        text, tokens = self.whole(item, where)
        if not tokens:
            raise UserError(f"{where} has no tokens: {text!r}")
        if len(tokens) > (limit := self._table.max_prompt_tokens):
            raise Overlong(
                f"{where} has {len(tokens)} tokens, more than data.max_prompt_tokens = {limit}: {text[:80]!r}"
            )
        return text, tokens

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, after: int | None, where: str) -> list[int]:
        """The tokens of a conversation up to the beginning of the model's next turn; ``tools``: those of an agent.

        after: the index of a message that the model wrote; only the tokens after its text are returned, beginning with
        those that end its turn. The text itself is not rendered, so that the result cannot depend on it. Raises
        `UserError` for messages that the template does not accept.
        """
        hidden = self._placeholders(messages)
        shown = _replaced(messages, hidden)
        if after is not None:
            shown[after] = {"role": "assistant", "content": _TURN}
        text = self._chat(self._begun(shown), where, tools)
        if after is not None:
            if text.count(_TURN) != 1:
                raise UserError(f"the chat template does not render each turn of {where} exactly once and unchanged")
            text = text.partition(_TURN)[2]
        return self._encode(text, {placeholder: token for token, placeholder in hidden.items()})

    def whole(self, item: Item, where: str) -> tuple[str, tuple[int, ...]]:
        """As `render`, however long the prompt is."""
        # only the columns that the template uses: others may hold megabytes of tests
        used = {name: value for name, value in item["metadata"].items() if name in self.shown}
        hidden = self._placeholders([item["question"], used])
        question, metadata = _replaced([item["question"], used], hidden)
        text = self.text({**item, "question": question, "metadata": {**item["metadata"], **metadata}}, where)
        shown = {placeholder: token for token, placeholder in hidden.items()}
        return _replaced(text, shown), tuple(self._encode(text, shown))

    def _prompt(self, messages: list[dict[str, Any]], row: dict[str, Any], where: str) -> str:
        """The text of a conversation with the columns that the template understands; a last turn of the model is left
        open. `UserError` unless the text of every message stands in it."""
        names = (name for name in self.shown - self._fields - {"tools"} if row.get(name) not in (None, "", [], {}))
        columns = {name: without_null(row[name]) for name in names}
        if twice := columns.keys() & self._table.template_arguments:
            raise UserError(f"{where} has a column {min(twice)}, which data.template_arguments sets too")
        try:
            for name, value in columns.items():
                check_exact(value, f"column {name}")
            tools = tools_of(None if "tools" in self._fields else row.get("tools"))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if (first := columns.pop("system", None)) is not None:
            if messages[0]["role"] == "system" or not isinstance(first, str):
                raise UserError(f"{where} has a column system, which must be a text, and the only system message")
            messages = [{"role": "system", "content": first}, *messages]
        messages = self._begun(messages)
        shape = tuple((message["role"], *message) for message in messages), bool(tools)
        if shape not in self._complete:
            marked = [message | {"content": f"{_TURN}{n}{_TURN}"} for n, message in enumerate(messages)]
            text = self._open(marked, where, tools, columns)
            if not all(str(name_of(tool)) in text for tool in tools or ()):
                raise UserError(f"{where} has tools, which the chat template does not show")
            self._check_shown(marked, text, where, messages)
            self._complete.add(shape)
        text = self._open(messages, where, tools, columns)
        self._check_shown(messages, text, where, messages)
        return text

    def _begun(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with `data.system` before them, if they have no system message."""
        if self._table.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._table.system}, *messages]

    def _open(self, messages: list[dict[str, Any]], where: str, tools: Any, columns: dict[str, Any]) -> str:
        """The text of a conversation up to what the model writes next, which may continue its last message."""
        if messages[-1]["role"] != "assistant":
            return self._chat(messages, where, tools, **columns)
        last = messages[-1] | {"content": messages[-1]["content"] + _END}
        whole = self._chat([*messages[:-1], last], where, tools, add_generation_prompt=False, **columns)
        text, *rest = whole.split(_END)
        if len(rest) != 1 or "tool_calls" in last:
            raise UserError(f"{where} ends with a message of the assistant that cannot be continued")
        return text

    def _check_shown(self, messages: list[dict[str, Any]], text: str, where: str, given: list[dict[str, Any]]) -> None:
        """`UserError` unless ``text`` has the contents and the called functions of all ``messages``."""
        for message, own in zip(messages, given, strict=True):
            needed = (str(name_of(call)) for call in message.get("tool_calls", ()))
            # templates leave out the reasoning of earlier turns
            for part in (*needed, message["content"].rpartition("</think>")[2]):
                if part.strip() not in text:
                    what = f"a message of {own['role']!r}: {own['content']!r:.60}"
                    raise UserError(f"{where}: the chat template does not show {what}")

    def _chat(
        self,
        messages: list[dict[str, Any]],
        where: str,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        **columns: Any,
    ) -> str:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            template = self._tokenizer.get_chat_template(self._chat_template, tools)
            # not an argument, because newer versions of transformers make a string of an argument that is no JSON
            _compile_jinja_template(template).globals["strftime_now"] = TODAY.strftime
            text: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._table.template_arguments,
                **columns,
            )
        except Exception as error:  # a template that does not fit can raise errors of Jinja and any of Python's
            raise UserError(f"the chat template does not fit {where}: {type(error).__name__}: {error}") from error
        return str(text)

    def _placeholders(self, shown: list[Any]) -> dict[str, str]:
        """Special tokens that are spelled out in ``shown`` -> placeholders that occur nowhere in it, to hide them."""
        if self._table.allow_special:
            return {}
        parts = [leaf for leaf in leaves(shown) if isinstance(leaf, str)]
        found = sorted({token for text in parts for token in self._special.findall(text)}, key=len, reverse=True)
        if not found:
            return {}
        everything = "".join(parts)
        unused = (f"\ufdd0{n}\ufdd1" for n in itertools.count())
        return dict(zip(found, (text for text in unused if text not in everything), strict=False))

    def _encode(self, text: str, shown: dict[str, str]) -> list[int]:
        """The tokens of ``text``; ``shown`` maps placeholders to special tokens, which are encoded as plain text."""
        tokens: list[int] = []
        # tokenization does not reach across special tokens, so the stretches between them can be encoded separately
        for stretch in re.split(f"({self._special.pattern})", text) if shown else [text]:
            spelled = _replaced(stretch, shown)
            plain = {"split_special_tokens": True} if spelled != stretch else {}
            tokens += self._tokenizer(spelled, add_special_tokens=False, **plain)["input_ids"] if spelled else []
        # a chat template writes its own beginning-of-sequence token, or needs none
        raw = self._table.template == "raw" and tokens and tokens[:1] != self._begin
        return [*self._begin, *tokens] if raw else tokens


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text("utf-8-sig")  # without a mark of the byte order, which would begin each prompt
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read data.template {path}: {error}") from error


def _names(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return []  # `_fill` reports what is wrong with it


def _fill(template: str, fields: dict[str, Any], where: str) -> str:
    try:
        if any(re.search(r"\d{4}|\{", spec or "") for _, _, spec, _ in string.Formatter().parse(template)):
            raise ValueError("a format is as long as thousands of characters, or a column")
        for name in _names(template):
            check_exact(string.Formatter().get_field(name, (), fields)[0], f"column {name}")
        return template.format(**fields)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"data.prompt_template {template!r} does not fit {where} ({error}); known fields are "
            + ", ".join("{" + name + "}" for name in sorted(fields))
        ) from error


def _replaced(value: Any, new: dict[str, str]) -> Any:
    """``value`` with the keys of ``new`` replaced by their values in all its strings."""
    if not new:
        return value
    if isinstance(value, str):
        for old in new:
            value = value.replace(old, new[old])
        return value
    if isinstance(value, dict):
        return {key: _replaced(part, new) for key, part in value.items()}
    return [_replaced(part, new) for part in value] if isinstance(value, list) else value
