"""Where a foreign value becomes an answer, a prompt or a message, and nowhere else; what is not exact is refused."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

NUMBER_DIGITS = 17  # characters up to which the text of a float is exact: it then has at most 15 digits
_SMALLEST = 1e-300  # numbers nearer to 0 may have fewer digits than others
# a text that is a conversation, or one message, as JSON or Python writes it: of messages as transformers or ShareGPT
_CHAT = re.compile(
    r"""\s*+(?:array\()?\s*+\[?\s*+\{(?=.*["'](?:role|from)["']\s*:)(?=.*["'](?:content|value)["']\s*:)\s*(.)""", re.S
)


class Inexact(float):
    """A number whose text has digits that a float of 64 bits cannot hold."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text, with `Inexact` for numbers that floats cannot hold.

    ValueError if it is malformed, or if an object has a name twice.
    """
    try:
        return json.loads(text, parse_float=_float, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has two values of one name: {[name for name, _ in pairs]!r:.80}")
    return found


def _float(text: str) -> float:
    number = float(text)
    short = abs(number) > _SMALLEST and len(text) < NUMBER_DIGITS
    exact = short or (math.isfinite(number) and Decimal(repr(number)) == Decimal(text))
    return number if exact else Inexact(number)


def answer_of(value: Any) -> str | None:
    """An answer as text: a number without exponent and without zeros at its end; ``None`` for null and "".

    ValueError for anything but a text and a finite number that is known exactly.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, Inexact):
        raise ValueError(f"answer has more digits than a number of 64 bits can hold, about {value!r}: put it in quotes")
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        raise ValueError(f"answer must be a non-empty string or a finite number, got {value!r:.60}")
    if isinstance(value, int):
        return str(value)
    digits = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits


def prompt_of(value: Any) -> str | list[dict[str, Any]]:
    """A prompt: text, or chat messages whose contents are texts; CSV files have the messages as JSON.

    ValueError, without the place, for one that is empty or not all text.
    """
    if isinstance(value, str) and (written := _CHAT.match(value)):
        if written[1] == "'":
            raise ValueError(f"prompt is a list as Python prints it, which is no JSON: {value:.60}")
        with contextlib.suppress(ValueError):
            value = parse(value)
    if isinstance(value, str) and value.strip():
        return value
    chat = isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    if not value or not chat:
        raise ValueError(f"prompt must be a string or a list of messages with role and content, got {value!r:.60}")
    return [_message(message, f"message {number} of prompt") for number, message in enumerate(value, 1)]


def _message(given: dict[str, Any], what: str) -> dict[str, Any]:
    """A message without null fields, which Parquet adds, with its parts as one text and parsed arguments of calls."""
    role, content, calls = given["role"], given["content"], given.get("tool_calls") or []
    if not isinstance(role, str) or not role:
        raise ValueError(f"{what} has the role {role!r:.60}, expected a text")
    if given.get("function_call"):
        raise ValueError(f"{what} has a function_call, which templates leave out: write it as tool_calls")
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
            if not isinstance(text, str):
                raise ValueError(f"{what} has a part that is no text, and only text can reach the model: {part!r:.60}")
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or (role == "user" and not content.strip()):
        raise ValueError(f"{what} must have a text as content, got {given['content']!r:.60}")
    message = {name: part for name, part in given.items() if part is not None} | {"content": content}
    return message | {"tool_calls": [_call(call, what) for call in calls]} if calls else message


def _call(call: Any, what: str) -> dict[str, Any]:
    """A call of a tool; templates write its arguments as JSON themselves."""
    call = without_null(call)
    if not isinstance(call, dict) or name_of(call) is None:
        raise ValueError(f"{what} has a tool call without a function's name: {call!r:.60}")
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            function["arguments"] = parse(arguments)
    check_exact(function.get("arguments"), f"{what} has a tool call that", null=True)
    return call


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a row, a list of objects or its JSON text; None if there are none. ValueError for others."""
    tools = parse(value) if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) and name_of(tool) for tool in tools)):
        raise ValueError(f"tools must be a list of objects with names, got {value!r:.60}")
    return tools


def name_of(tool: dict[str, Any]) -> str | None:
    """The name of the function of a tool or of a call; None if that is no text."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def leaves(value: Any) -> Iterator[Any]:
    """All values in nested lists and dictionaries that are neither."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def check_exact(value: Any, what: str, null: bool = False) -> None:
    """ValueError if a value, ``what`` in the message, would not become text as it was written. null: it may be null."""
    for part in leaves(value):
        if part is None and not null:
            raise ValueError(f"{what} is null")
        if isinstance(part, bytes | Inexact) or (isinstance(part, float) and not math.isfinite(part)):
            raise ValueError(f"{what} has {part!r:.60}, which is no exact text")


def without_null(value: Any) -> Any:
    """A value without the null fields of its objects, which Parquet adds so that all have the same fields."""
    if isinstance(value, dict):
        return {name: without_null(part) for name, part in value.items() if part is not None}
    return [without_null(part) for part in value] if isinstance(value, list) else value
