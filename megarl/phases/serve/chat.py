"""OpenAI's chat messages, and the tokens that a conversation is made of. Nothing that the model wrote is tokenised."""

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

Message = dict[str, Any]
# as Qwen's and Hermes' templates ask for it
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# what would make the stored log-probs other ones than those of the recipe's distribution
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
    """A request that is not served: an HTTP status, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Question:
    """A checked request of a chat completion."""

    messages: list[Message]
    tools: list[Any] | None
    max_tokens: int | None


def read_question(body: Any, temperature: float) -> Question:
    """`Refused` (400) for what the phase cannot serve, or could only by sampling from another distribution."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused(400, "messages: expected a list of messages")
    for name, allowed in _NEUTRAL.items():
        if body.get(name) not in allowed:
            raise Refused(400, f"{name} = {body[name]!r}: responses that are trained are sampled as the recipe says")
    if body.get("temperature") not in (None, temperature):
        raise Refused(
            400, f"temperature = {body['temperature']!r}, but the recipe's rollout.temperature = {temperature}"
        )
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise Refused(400, f"max_tokens = {limit!r}: expected a number from 1 on")
    if not isinstance(body.get("stream"), bool | None) or not isinstance(body.get("stream_options"), dict | None):
        raise Refused(400, "stream: expected true or false, and perhaps stream_options beside it")
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise Refused(400, "tools: expected a list")
    return Question([_message(one) for one in body["messages"]], tools, limit)


def _message(given: Any) -> Message:
    """Role and content as text; of an assistant its tool calls, of a tool whom it answers. All else is left out."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(400, "messages: expected objects with role and content")
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(400, "messages: content has parts that are no text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused(400, "messages: content is no text")
    message: Message = {"role": given["role"], "content": content or ""}
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise Refused(400, "messages: tool_calls is no list")
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


def first_tokens(renderer: Renderer, question: Question, where: str) -> list[int]:
    """Of all messages before the model's first turn."""
    return _render(renderer, question.messages, question.tools, None, where)


def further_tokens(renderer: Renderer, question: Question, turn: int, ended: int, where: str) -> list[int]:
    """Of what follows the model's message number ``turn``, whose last token was ``ended``.

    The template ends each turn with a token that the model may have sampled itself: it is not repeated.
    """
    tokens = _render(renderer, question.messages, question.tools, turn, where)
    return tokens[1:] if tokens[:1] == [ended] else tokens


def _render(renderer: Renderer, messages: list[Message], tools: Any, after: int | None, where: str) -> list[int]:
    try:
        return renderer.chat([_parsed(message) for message in messages], tools, after, where)
    except UserError as error:
        raise Refused(400, str(error)) from error


def _parsed(message: Message) -> Message:
    """With the arguments of tool calls as objects, which templates write as JSON themselves."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError, TypeError):  # what the model wrote need not be JSON
            arguments = json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def answer(text: str, tools: list[Any] | None) -> Message:
    """What the model said, as a message; its calls of tools apart, where there are any to call."""
    calls = []
    for found in _CALL.finditer(text) if tools else ():
        try:
            call = json.loads(found[1])
            arguments = call.get("arguments", {})
            function = {"name": str(call["name"]), "arguments": json.dumps(arguments)}
        except (ValueError, KeyError, AttributeError, RecursionError):
            continue  # it stays in the text
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        text = text.replace(found[0], "", 1)
    message: Message = {"role": "assistant", "content": text.strip() if calls else text}
    return message | {"tool_calls": calls} if calls else message


def same(ours: Message, theirs: Message) -> bool:
    """Whether a client sends back what it was given."""
    return all(ours.get(key) == theirs.get(key) for key in ("role", "content", "tool_calls"))


def continues(before: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether a conversation of messages ``before``, the model's included, goes on in ``now``."""
    return len(now) > len(before) and all(same(a, b) for a, b in zip(before, now, strict=False))


def repeats(before: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether ``now`` asks again for the model's message that ends ``before``."""
    return len(now) == len(before) - 1 and all(same(a, b) for a, b in zip(before, now, strict=False))
