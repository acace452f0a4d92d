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
from typing import TYPE_CHECKING, Any

from megarl.data.templates import Renderer
from megarl.errors import UserError
from megarl.foreign import parse_json, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_NONE = object()
# Tool calls as Qwen's and Hermes' templates ask for them: an object between two tags. JSON has "<" and "\\" in strings
# alone; so no tag outside of a string is passed, and the time of a search grows with the text and not with its square.
TAGS = ("<tool_call>", "</tool_call>")
MOST_MESSAGES = 4096  # of a conversation
THOUGHTS = ("<think>", "</think>")
_CALL = re.compile(rf'{TAGS[0]}\s*({{(?:[^"<\\]|"(?:[^"\\]|\\.)*+")*+){TAGS[1]}', re.DOTALL)
# fields of a request, of OpenAI's API and of vLLM's: those that are honoured,
HONOURED = frozenset(
    {
        *("messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
        *("temperature", "chat_template_kwargs"),  # accepted only as the recipe has them
        *("logprobs", "return_token_ids"),  # read where the answer is written
    }
)
# those that are ignored whatever they say: labels, prices and caches, on which no answer depends,
HARMLESS = frozenset(
    {
        *("metadata", "model", "safety_identifier", "service_tier", "user"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
)
# and (value, fields) of those in which it asks for what is done anyway. All others are refused unless they are null.
NEUTRAL: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (True, ("parallel_tool_calls", "skip_special_tokens")),
    (False, ("ignore_eos", "store")),
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
STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})  # the second pads events, which loopback hides


class Refused(Exception):
    """A request that is refused, with an HTTP status and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """A validated request for a chat completion."""

    messages: list[Message]
    tools: list[Any] | None
    max_tokens: int | None


def parse_chat_request(body: Any, temperature: float, template_arguments: Mapping[str, Any]) -> ChatRequest:
    """Validate the body of a request; `Refused` (400), which names the field, for everything that would be ignored.

    temperature, template_arguments: those of the recipe, the only ones that are accepted.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused(400, "messages: expected a list of messages")
    if len(body["messages"]) > MOST_MESSAGES:
        raise Refused(400, f"messages: at most {MOST_MESSAGES}, since each is rendered with all before it")
    for name, value in body.items():
        neutral = value is None or any(value == accepted and name in fields for accepted, fields in NEUTRAL)
        if not neutral and name not in HONOURED | HARMLESS:
            why = "leave it out, because the recipe says how responses are sampled"
            raise Refused(400, f"{name[:60]} = {shown(value)} is not accepted: {why}")
    if body.get("temperature") not in (None, temperature):
        raise Refused(
            400,
            f"temperature = {shown(body['temperature'])}, but the recipe has rollout.temperature = {temperature}: "
            "leave it out",
        )
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict) or not all(template_arguments.get(k, _NONE) == v for k, v in arguments.items()):
        raise Refused(400, f"chat_template_kwargs = {shown(arguments)}: set them in [data] template_arguments")
    limits = {name: body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    for name, limit in limits.items():
        if type(limit) is not int or limit < 1:
            raise Refused(400, f"{name} = {shown(limit)}: expected an integer of at least 1")
    for name in ("stream", "logprobs", "return_token_ids"):
        if not isinstance(body.get(name), bool | None):
            raise Refused(400, f"{name}: expected true or false")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not body.get("stream")):
        raise Refused(400, "stream_options: expected an object, together with stream = true")
    for name, value in options.items():
        if value not in ((True, False, None) if name in STREAM_OPTIONS else (False, None)):
            raise Refused(400, f"stream_options: {name[:60]} = {shown(value)} is not accepted")
    messages, tools = _in_order([_message(one) for one in body["messages"]]), _tools(body.get("tools"))
    return ChatRequest(messages, tools, min(limits.values(), default=None))


def _tools(given: Any) -> list[Any] | None:
    """The functions that the model may call, as the chat template gets them; None without any."""
    if not given:
        return None
    if not isinstance(given, list):
        raise Refused(400, "tools: expected a list")
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f'tools: {shown(tool)} is not {{"type": "function", "function": {{"name": ...}}}}')
        if function.get("strict"):
            raise Refused(
                400, "tools: strict = true is not accepted, because the recipe says how responses are sampled"
            )
    return given


def _message(given: Any) -> Message:
    """A message with role, content as text, tool calls, tool_call_id and name; nothing else may be in it."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(400, "messages: expected objects with role and content")
    message: Message = {"role": given["role"], "content": _content(given)}
    for name, value in given.items():
        if name in message or value in (None, [], ""):
            continue
        if name == "tool_calls":
            if not isinstance(value, list) or given["role"] != "assistant":
                raise Refused(400, "messages: tool_calls must be a list in a message of the assistant")
            message[name] = [_call(call) for call in value]
        elif name in ("tool_call_id", "name") and isinstance(value, str):
            message[name] = value
        else:
            raise Refused(400, f"messages: {name[:60]} = {shown(value)} of a message is not accepted")
    return message


def _content(message: Message) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""  # tool calls alone
    if isinstance(content, list) and content:
        for part in content:
            text = part.get("text") if isinstance(part, dict) and part.keys() <= {"type", "text"} else None
            if not isinstance(text, str) or part.get("type") != "text":
                raise Refused(400, "messages: all parts of content must be text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(400, f"messages: content of a message of {message['role'][:60]!r} must be text")
    return content


def _call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        found = {"id": call["id"], "type": "function", "function": {k: function[k] for k in ("name", "arguments")}}
    except (TypeError, KeyError) as error:
        raise Refused(400, f"messages: a tool call lacks {error}") from error
    if call.get("type", "function") != "function" or not all(isinstance(v, str) for v in found["function"].values()):
        raise Refused(400, "messages: a tool call needs a function whose name and arguments are texts")
    return found


def _in_order(messages: list[Message]) -> list[Message]:
    """The messages with the results of an answer's calls in the order of the calls.

    Most templates show no ids, so that the model tells results apart by their order; clients may send them in any.
    """
    found: list[Message] = []
    calls, first = list[str](), 0  # the ids of the calls of the last answer, and where its results begin
    for message in messages:
        found.append(message)
        if message["role"] != "tool":
            calls, first = [call["id"] for call in message.get("tool_calls", ())], len(found)
        elif calls and (name := message.get("tool_call_id")) is not None:
            if name not in calls:
                raise Refused(400, f"messages: tool_call_id = {shown(name)} names no call of the answer before it")
            if all("tool_call_id" in one for one in found[first:]):
                found[first:] = sorted(found[first:], key=lambda one: calls.index(one["tool_call_id"]))
    return found


def new_tokens(renderer: Renderer, request: ChatRequest, after: int | None, where: str) -> list[int]:
    """The tokens of all messages that follow the model's message with index ``after``; None: before its first turn.

    `Refused` unless the template shows every new message, and tools: rendered with others they give other tokens.
    where: names the conversation in errors.
    """
    found = _render(renderer, request.messages, request.tools, after, where)
    short = [message | {"content": "1"} for message in request.messages]

    def tokens(changed: dict[int, Message], tools: list[Any] | None) -> list[int]:
        return _render(renderer, [changed.get(n, one) for n, one in enumerate(short)], tools, after, where)

    whole = tokens({}, request.tools)
    if after is None and request.tools and tokens({}, None) == whole:
        raise Refused(400, "tools: the chat template does not show them")
    for number in range(0 if after is None else after + 1, len(short)):
        own = short[number]
        # other names tell who speaks; a tool's says nothing that the place of its result does not
        fields = {"content", "tool_calls", "name"} if own["role"] != "tool" else {"content"}
        for field in sorted(fields & own.keys()):
            other = own | {"content": "1 1 1"} if field == "content" else {k: own[k] for k in own.keys() - {field}}
            if tokens({number: other}, request.tools) == whole:
                role = own["role"][:60]
                raise Refused(400, f"messages: the chat template does not show {field} of a message of {role!r}")
    return found


def _render(renderer: Renderer, messages: list[Message], tools: Any, after: int | None, where: str) -> list[int]:
    try:
        return renderer.chat([_parsed(message) for message in messages], tools, after, where)
    except UserError as error:
        raise Refused(400, str(error)) from error


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
