"""The messages between the processes of `megarl.rewards.pool`: batches of questions one way, of answers the other.

A question is a prompt with one response to score, or with a group of responses; an answer is one response's verdict.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from megarl.data.prompts import Prompt

MESSAGE = struct.Struct(">II")  # header: the number of questions or answered questions, bytes that follow
QUESTION = struct.Struct(">QIII")  # header: number of the first response, their count, bytes of prompt and responses


class Channel:
    """Sends and receives messages over a socket without ever blocking."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.setblocking(False)
        self.unsent, self._received = bytearray(), bytearray()
        self.closed = False  # whether the other end has closed the connection

    def send(self, items: int, body: bytes) -> None:
        self.unsent += MESSAGE.pack(items, len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send as much of ``unsent`` as the socket accepts now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

    def receive(self) -> list[tuple[int, bytes]]:
        """All messages that have arrived whole: (number of questions or answered questions, body) of each."""
        try:
            while data := self.socket.recv(1 << 20):
                self._received += data
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True
        messages = []
        while len(self._received) >= MESSAGE.size:
            items, size = MESSAGE.unpack_from(self._received)
            if len(self._received) < MESSAGE.size + size:
                break
            messages.append((items, bytes(self._received[MESSAGE.size : MESSAGE.size + size])))
            del self._received[: MESSAGE.size + size]
        return messages


def pack_question(number: int, prompt: bytes, responses: str | tuple[str, ...]) -> bytes:
    """A question in bytes; the body of a message is any number of them in a row. ``prompt`` is already pickled."""
    texts, count = pickle.dumps(responses), 1 if isinstance(responses, str) else len(responses)
    return QUESTION.pack(number, count, len(prompt), len(texts)) + prompt + texts


def split(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield for each question of a message: the number of its first response, their count, the question in bytes."""
    begin = 0
    while begin < len(body):
        number, count, *sizes = QUESTION.unpack_from(body, begin)
        end = begin + QUESTION.size + sum(sizes)
        yield number, count, body[begin:end]
        begin = end


def unpack_question(question: bytes) -> tuple[Prompt, str | tuple[str, ...]]:
    """The prompt of a question, and its response or group of responses."""
    texts = QUESTION.size + QUESTION.unpack_from(question)[2]
    return pickle.loads(question[QUESTION.size : texts]), pickle.loads(question[texts:])


def pack_answers(answers: Iterable[tuple[int, dict[str, Any]]]) -> bytes:
    """Encode pairs (number of the response, verdict) as JSON. No pickles: a response may have taken over its worker."""
    return json.dumps(list(answers)).encode()
