"""Encodes plain values as JSON between a program and its tests, so that a program can send its tests only data.

Any other object stays where it is; its number is sent instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Convert ``value`` to what `json` can write. ``keep`` is called with an object that is not plain data.

    keep returns what to send in its place. An instance of the program's own subclass of list, set or dict is not plain
    data, because it may have methods.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}  # converting a long integer to decimals would take quadratic time
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if type(value).__module__ == "solution" and not isinstance(value, tuple):
        return keep(value)
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    return keep(value)


def decode(found: Any, remote: Callable[[int], Any]) -> Any:
    """The inverse of `encode`; ``remote`` returns what represents the object with a given number on the other side."""
    if not isinstance(found, dict):
        if found is None or isinstance(found, bool | str | float):
            return found
        raise ValueError("no value")
    ((name, content),) = found.items()
    if name == "int":
        return int(content, 16)
    if name == "complex":
        return complex(*content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode(key, remote): decode(item, remote) for key, item in content}
    if name == "object":
        return remote(content)
    return SEQUENCES[name](decode(item, remote) for item in content)
