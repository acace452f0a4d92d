"""OpenAI's chat messages, and their conversion to tokens and back.

Text that the model wrote is never tokenised again: its turns keep the tokens that were sampled.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from megarl.data.templates import Renderer
from megarl.errors import UserError
from megarl.foreign import parse_json, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
# Tool calls as Qwen's and Hermes' templates ask for them: an object between two tags. JSON has "<" and "\\" in strings
# alone; so no tag outside of a string is passed, and the time of a search grows with the text and not with its square.
TAGS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("<think>", "</think>")
_CALL = re.compile(rf'{TAGS[0]}\s*({{(?:[^"<\\]|"(?:[^"\\]|\\.)*+")*+){TAGS[1]}', re.DOTALL)
# Fields of a request, of OpenAI's API and of vLLM's, that are ignored whatever they say: labels, prices and caches,
HARMLESS = frozenset(
    {
        *("metadata", "model", "safety_identifier", "service_tier", "user"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
)
# and (value, fields) of those in which it asks for what is done anyway. Beside these and those of `_Request`, all are
# refused unless they are null.
NEUTRAL: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (True, ("parallel_tool_calls", "skip_special_tokens")),
    (False, ("ignore_eos", "logprobs", "return_token_ids", "store")),
    (0, ("frequency_penalty", "min_p", "min_tokens", "presence_penalty", "top_k", "top_logprobs")),
    (1, ("n", "repetition_penalty", "top_p")),
    (-1, ("top_k",)),
    ([], ("functions", "stop", "stop_token_ids")),
    ({}, ("logit_bias",)),
    ("", ("stop",)),
    ("auto", ("tool_choice",)),
    (["text"], ("modalities",)),
    ({"type": "text"}, ("response_format",)),
)


class Refused(Exception):
    """A request that is refused, with an HTTP status and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _Function(BaseModel, strict=True):
    name: str
    arguments: str


class _ToolCall(BaseModel, strict=True):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Strict):
    role: str
    content: str | list[_Text]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        """Clients send answers back with all fields of the API; one may have calls instead of content."""
        if not isinstance(given, dict):
            return given
        said = {k: v for k, v in given.items() if v not in (None, [], "") or (k, v) == ("content", "")}
        return {"content": ""} | said if given.get("role") == "assistant" else said

    @field_validator("content")
    @classmethod
    def _joined(cls, content: str | list[_Text]) -> str:
        return content if isinstance(content, str) else "".join(part.text for part in content)


class _Signature(BaseModel, strict=True):
    name: str
    strict: Literal[False] | None = None  # calls would be sampled under a grammar


class _Tool(BaseModel, strict=True):
    type: Literal["function"]
    function: _Signature


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # pads events, which loopback hides


class _Request(_Strict):
    """The fields of a request for a chat completion that are honoured."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A validated request for a chat completion."""

    messages: list[Message]
    tools: list[Any] | None  # as the client wrote them
    max_tokens: int | None


def parse_chat_request(body: Any, temperature: float, template_arguments: Mapping[str, Any]) -> ChatRequest:
    """Validate the body of a request; `Refused` (400), which names the field, for everything that would be ignored.

    temperature, template_arguments: those of the recipe, the only ones that are accepted.
    """
    neutral = (*NEUTRAL, (temperature, ("temperature",)))

    def is_done_anyway(name: str, value: Any) -> bool:
        if name == "chat_template_kwargs" and isinstance(value, dict):
            return value.items() <= template_arguments.items()
        return value is None or name in HARMLESS or any(value == done and name in names for done, names in neutral)

    try:
        asked = {k: v for k, v in body.items() if not is_done_anyway(k, v)} if isinstance(body, dict) else body
        found = _Request.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        place = ": ".join(map(str, first["loc"]))[:100]
        why = "docs/stages.md says which fields are accepted; the recipe says how responses are sampled"
        raise Refused(400, f"{place} = {shown(first['input'])}: {first['msg']}. {why}") from error
    messages = [message.model_dump(exclude_none=True) for message in found.messages]
    limits = [limit for limit in (found.max_tokens, found.max_completion_tokens) if limit is not None]
    return ChatRequest(messages, asked.get("tools") or None, min(limits, default=None))


def new_tokens(renderer: Renderer, request: ChatRequest, after: int | None, where: str) -> list[int]:
    """The tokens of all messages that follow the model's message with index ``after``; None: before its first turn.

    `Refused` for messages that the template does not accept, and for tools that it does not show. where: names the
    conversation in errors.
    """
    messages = [_parsed(message) for message in request.messages]
    try:
        found = renderer.chat(messages, request.tools, after, where)
        hidden = after is None and request.tools and renderer.chat(messages, None, after, where) == found
    except UserError as error:
        raise Refused(400, str(error)) from error
    if hidden:
        raise Refused(400, "tools: the chat template does not show them")
    return found


def _parsed(message: Message) -> Message:
    """The message with the arguments of tool calls parsed, because templates write them as JSON themselves."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError, TypeError):  # the model may have written invalid JSON
            arguments = parse_json(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """A function from the tokens of an answer to its text, without special tokens; `TAGS` and `THOUGHTS` stay."""
    added = tokenizer.added_tokens_decoder.items()
    hidden = {number for number, token in added if token.special and token.content not in TAGS + THOUGHTS}
    return lambda tokens: str(tokenizer.decode([token for token in tokens if token not in hidden]))


def answer(text: str, tools: list[Any] | None, thinks: bool = False) -> Message:
    """The model's text as a message; if there are ``tools``, calls in the text become `tool_calls`.

    What stands in thoughts is no call: as with vLLM's parsers, they end with the first `</think>`, else never.
    thinks: whether the prompt ends with `<think>`, as templates of models that always think write it.
    """
    calls, rest, done = [], "", 0
    begun = thinks or text.lstrip().startswith(THOUGHTS[0])
    thought = text.find(THOUGHTS[1]) if THOUGHTS[1] in text else len(text) * begun
    found = _CALL.search(text, thought) if tools else None
    while found:
        if function := _function(found[1].strip()):
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            rest, done = rest + text[done : found.start()], found.end()
        found = _CALL.search(text, found.end() if function else found.start() + 1)
    message: Message = {"role": "assistant", "content": (rest + text[done:]).strip() if calls else text}
    return message | {"tool_calls": calls} if calls else message


def _function(written: str) -> dict[str, str] | None:
    """The function of a call and its arguments; None if that is no valid call, which stays in the text."""
    try:
        call = parse_json(written)
        # an object without arguments is a call only if nothing else in it may be meant as such
        arguments = call["arguments"] if len(call) > 1 else {}
        if isinstance(arguments, str):  # some models write the object as a text
            arguments = parse_json(arguments)
        if not isinstance(arguments, dict) or not isinstance(call["name"], str):
            return None
        # Python reads and writes NaN and Infinity, which are no JSON
        return {"name": call["name"], "arguments": json.dumps(arguments, allow_nan=False)}
    except (ValueError, KeyError):
        return None


def same(ours: Message, theirs: Message) -> bool:
    """Whether a message that a client sends back is the one that it was given; it may write arguments differently."""
    ours, theirs = _parsed(ours), _parsed(theirs)
    return all(ours.get(key) == theirs.get(key) for key in ("role", "content", "tool_calls"))
