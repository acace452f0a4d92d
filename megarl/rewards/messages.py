"""What the processes of `megarl.rewards.pool` say to each other: batches of questions, and of answers."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from megarl.data.prompts import Prompt

MESSAGE = struct.Struct(">II")  # how many questions or answers, bytes that follow
QUESTION = struct.Struct(">QIII")  # the number of its first response, how many it has, bytes of prompt and responses


class Channel:
    """Messages both ways over a socket, neither of which ever waits."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.setblocking(False)
        self.unsent, self._received = bytearray(), bytearray()
        self.closed = False  # by the other end

    def send(self, items: int, body: bytes) -> None:
        self.unsent += MESSAGE.pack(items, len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

    def receive(self) -> list[tuple[int, bytes]]:
        """All messages that have arrived: how many questions or answers each has, and these."""
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
    """``prompt``: pickled. Many questions in a row are a message's body."""
    texts, count = pickle.dumps(responses), 1 if isinstance(responses, str) else len(responses)
    return QUESTION.pack(number, count, len(prompt), len(texts)) + prompt + texts


def split(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number of its first response, how many it has, packed question) of each question of a message."""
    begin = 0
    while begin < len(body):
        number, count, *sizes = QUESTION.unpack_from(body, begin)
        end = begin + QUESTION.size + sum(sizes)
        yield number, count, body[begin:end]
        begin = end


def unpack_question(question: bytes) -> tuple[Prompt, str | tuple[str, ...]]:
    """The prompt, and the response or the group of responses that it is about."""
    texts = QUESTION.size + QUESTION.unpack_from(question)[2]
    return pickle.loads(question[QUESTION.size : texts]), pickle.loads(question[texts:])


def pack_answers(answers: Iterable[tuple[int, dict[str, Any]]]) -> bytes:
    """(number of the response, verdict) of some; no pickles, since a response may have got hold of who answers."""
    return json.dumps(list(answers)).encode()
