"""OpenAI's chat messages, and their conversion to tokens and back.

Text that the model wrote is never tokenised again: its turns keep the tokens that were sampled.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.templates import Renderer
from megarl.errors import UserError
from megarl.foreign import parse_json

Message = dict[str, Any]
# tool calls as Qwen's and Hermes' templates ask for them
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# settings that change the sampled distribution from the recipe's, with the only values that are accepted
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_p": (None, 1),
    "stop": (None, [], ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
}


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


def parse_chat_request(body: Any, temperature: float) -> ChatRequest:
    """Validate the body of a request; `Refused` (400) for settings that would change the sampled distribution.

    temperature: that of the recipe, the only one that is accepted.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused(400, "messages: expected a list of messages")
    for name, allowed in _NEUTRAL.items():
        if body.get(name) not in allowed:
            raise Refused(
                400, f"{name} = {body[name]!r} is not accepted, because the recipe says how responses are sampled"
            )
    if body.get("temperature") not in (None, temperature):
        raise Refused(
            400,
            f"temperature = {body['temperature']!r}, but the recipe has rollout.temperature = {temperature}: leave it "
            "out",
        )
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise Refused(400, f"max_tokens = {limit!r}: expected an integer of at least 1")
    if not isinstance(body.get("stream"), bool | None) or not isinstance(body.get("stream_options"), dict | None):
        raise Refused(400, "stream: expected true or false; stream_options: expected an object")
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise Refused(400, "tools: expected a list")
    return ChatRequest([_message(one) for one in body["messages"]], tools, limit)


def _message(given: Any) -> Message:
    """A message with role, content as text, tool calls, tool_call_id and name; other fields are dropped."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(400, "messages: expected objects with role and content")
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(400, "messages: all parts of content must be text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused(400, "messages: content must be text")
    message: Message = {"role": given["role"], "content": content or ""}
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise Refused(400, "messages: tool_calls must be a list")
        message["tool_calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        return {"id": call["id"], "type": "function", "function": {k: function[k] for k in ("name", "arguments")}}
    except (TypeError, KeyError) as error:
        raise Refused(400, f"messages: a tool call lacks {error}") from error


def first_tokens(renderer: Renderer, request: ChatRequest, where: str) -> list[int]:
    """The tokens of all messages before the model's first turn. where: names the conversation in errors."""
    return _render(renderer, request.messages, request.tools, None, where)


def further_tokens(renderer: Renderer, request: ChatRequest, turn: int, ended: int, where: str) -> list[int]:
    """The tokens of all that follows the model's message with index ``turn``, whose last token was ``ended``.

    The template ends each message with a token that the model may have sampled itself; then it is not repeated.
    """
    tokens = _render(renderer, request.messages, request.tools, turn, where)
    return tokens[1:] if tokens[:1] == [ended] else tokens


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


def answer(text: str, tools: list[Any] | None) -> Message:
    """The model's text as a message; if there are ``tools``, calls in the text become `tool_calls`."""
    calls = []
    for found in _CALL.finditer(text) if tools else ():
        try:
            call = parse_json(found[1])
            arguments = call.get("arguments", {})
            function = {"name": str(call["name"]), "arguments": json.dumps(arguments)}
        except (ValueError, KeyError, AttributeError):
            continue  # not a valid call: it stays in the text
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        text = text.replace(found[0], "", 1)
    message: Message = {"role": "assistant", "content": text.strip() if calls else text}
    return message | {"tool_calls": calls} if calls else message


def same(ours: Message, theirs: Message) -> bool:
    """Whether a message that a client sends back is the one that it was given."""
    return all(ours.get(key) == theirs.get(key) for key in ("role", "content", "tool_calls"))


def continues(before: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether messages ``now`` begin with all of ``before``, the model's answers included, and add more."""
    return len(now) > len(before) and all(same(a, b) for a, b in zip(before, now, strict=False))


def repeats(before: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether messages ``now`` ask again for the model's answer with which ``before`` ends."""
    return len(now) == len(before) - 1 and all(same(a, b) for a, b in zip(before, now, strict=False))
