"""The key-value store that the processes of a run share; the leader hosts it.

torch's own TCPStore obeys whoever reaches its port. Here both ends prove that they know the run's secret before
anything else is read, and every message carries an HMAC with the connection's key over direction, sequence number and
content: a forged, repeated, omitted or reordered message ends its connection and changes nothing.

    client -> server    16 random bytes c
    server -> client    16 random bytes s, HMAC(secret, "server" c s)
    client -> server    HMAC(secret, "client" c s)
    then both ways      length (4 bytes), HMAC(key, sender number body), body;  key = HMAC(secret, "session" c s)

``sender`` is "client" or "server", ``number`` counts the sender's messages from 0 (8 bytes), ``body`` is JSON.

Values are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

NONCE, DIGEST = 16, 32  # bytes
LENGTH = struct.Struct(">I")
SECRET = "MEGARL_STORE_SECRET"  # environment variable by which an agent gives its processes the secret, hexadecimal
HANDSHAKE_SECONDS = 10.0
MAX_UNAUTHENTICATED = 64  # connections whose handshake is not complete; beyond that the oldest ones are closed


def new_secret() -> bytes:
    return secrets.token_bytes(DIGEST)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


class _Session:
    """One end of an authenticated connection.

    ours, theirs: b"server" or b"client", the name of this end and of the other one.
    """

    def __init__(self, secret: bytes, nonces: bytes, ours: bytes, theirs: bytes) -> None:
        self._key, self._ours, self._theirs = _mac(secret, b"session", nonces), ours, theirs
        self._sent = self._received = 0
        self._data = bytearray()

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        number, self._sent = self._sent, self._sent + 1
        return LENGTH.pack(len(body)) + _mac(self._key, self._ours, number.to_bytes(8), body) + body

    def unpack(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes. ConnectionError if one is not the next message of the other end."""
        self._data += data
        messages, start = [], LENGTH.size + DIGEST
        while len(self._data) >= start:
            end = start + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            mac, body = self._data[LENGTH.size : start], bytes(self._data[start:end])
            if not hmac.compare_digest(mac, _mac(self._key, self._theirs, self._received.to_bytes(8), body)):
                raise ConnectionError("received a message with a wrong HMAC: the other end did not send it, or not now")
            self._received += 1
            del self._data[:end]
            messages.append(json.loads(body))
        return messages


@dataclass(eq=False)
class _Peer:
    """The server's end of a connection."""

    socket: socket.socket
    since: float = field(default_factory=time.monotonic)
    nonces: bytes = b""  # c s, once the client has sent c
    received: bytes = b""  # what has arrived of the handshake
    session: _Session | None = None  # once the client is authenticated
    unsent: bytearray = field(default_factory=bytearray)
    awaits: list[str] = field(default_factory=list)  # keys of a "wait" that is unanswered because some are not set


class StoreServer:
    """Serves clients from a thread of its own until `close`.

    host: the address to listen on, "" for all addresses of this machine. port: 0 picks a free one.
    """

    def __init__(self, secret: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        if host:
            self._listener = socket.create_server((host, port), backlog=1024)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
        self.port = self._listener.getsockname()[1]
        self._secret = secret
        self._values: dict[str, str] = {}
        self._peers: dict[Any, _Peer] = {}  # by socket
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for readable in (self._listener, self._woken):
            readable.setblocking(False)
            self._selector.register(readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(HANDSHAKE_SECONDS):
                if key.fileobj is self._woken:
                    for end in (self._listener, self._woken, *self._peers):
                        end.close()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif (peer := self._peers.get(key.fileobj)) is not None:
                    self._receive(peer)
            self._drop_unauthenticated()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone, or too many files are open
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[connection] = _Peer(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop_unauthenticated(self) -> None:
        """Close connections whose handshake takes too long, and the oldest of too many."""
        waiting = [peer for peer in self._peers.values() if not peer.session]
        expired = time.monotonic() - HANDSHAKE_SECONDS
        for number, peer in enumerate(waiting):
            if peer.since < expired or number < len(waiting) - MAX_UNAUTHENTICATED:
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.socket]
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _receive(self, peer: _Peer) -> None:
        try:
            self._flush(peer)
            data = peer.socket.recv(1 << 20)
            if not data:
                raise ConnectionError
            if peer.session is None:
                data = self._handshake(peer, data)
            for request in peer.session.unpack(data) if peer.session else ():
                self._answer(peer, request)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            if peer.socket in self._peers:
                self._drop(peer)

    def _handshake(self, peer: _Peer, data: bytes) -> bytes:
        """Continue the handshake with ``data``; returns the bytes that follow it, b"" while it is not complete."""
        peer.received += data
        if not peer.nonces and len(peer.received) >= NONCE:
            peer.nonces = peer.received[:NONCE] + secrets.token_bytes(NONCE)
            peer.unsent += peer.nonces[NONCE:] + _mac(self._secret, b"server", peer.nonces)
            self._flush(peer)
        if len(peer.received) < NONCE + DIGEST:
            return b""
        proof, rest = peer.received[NONCE : NONCE + DIGEST], peer.received[NONCE + DIGEST :]
        if not hmac.compare_digest(proof, _mac(self._secret, b"client", peer.nonces)):
            raise ConnectionError("the client does not know the secret")
        peer.session, peer.received = _Session(self._secret, peer.nonces, b"server", b"client"), b""
        return rest

    def _answer(self, peer: _Peer, request: list[Any]) -> None:
        name, *arguments = request
        if name == "wait":
            peer.awaits = arguments[0]
            self._answer_wait(peer)
            return
        self._reply(peer, getattr(self, f"_do_{name}")(*arguments))
        if name in ("set", "add", "compare_set"):
            for other in [other for other in self._peers.values() if other.awaits]:
                self._answer_wait(other)

    def _answer_wait(self, peer: _Peer) -> None:
        """Answer the peer's "wait" if all of its keys are set by now."""
        if all(key in self._values for key in peer.awaits):
            keys, peer.awaits = peer.awaits, []
            self._reply(peer, [self._values[key] for key in keys])

    def _reply(self, peer: _Peer, answer: Any) -> None:
        assert peer.session
        peer.unsent += peer.session.pack(answer)
        try:
            self._flush(peer)
        except OSError:  # a waiting peer that has gone: dropped when its own socket is read, not in another's request
            peer.unsent.clear()

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.socket).events != events:
            self._selector.modify(peer.socket, events)

    def _do_set(self, key: str, value: str) -> None:
        self._values[key] = value

    def _do_find(self, keys: list[str]) -> list[str | None]:
        return [self._values.get(key) for key in keys]

    def _do_add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + amount)
        return int(self._values[key])

    def _do_compare_set(self, key: str, expected: str, desired: str) -> str:
        """Returns the value after the call, ``expected`` if there is none. As in TCPStore, a missing key equals ""."""
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def _do_delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _do_count(self) -> int:
        return len(self._values)


class StoreClient(dist.Store):
    """A connection to a `StoreServer` with the methods of torch's stores. Thread-safe; one request is sent at a time.

    Raises ConnectionError if the server cannot be reached, belongs to another run, or has gone. Keep a reference to it
    as long as torch uses it: torch keeps only the C++ half alive.
    """

    def __init__(
        self, address: str, port: int, secret: bytes, timeout: timedelta, connect_seconds: float = HANDSHAKE_SECONDS
    ) -> None:
        super().__init__()
        self._arguments = (address, port, secret, timeout)
        self._timeout, self._lock = timeout, threading.Lock()
        self._clones: list[StoreClient] = []
        self._socket = socket.create_connection((address, port), timeout=connect_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE)
        self._socket.sendall(nonce)
        answer = b""
        while len(answer) < NONCE + DIGEST:
            answer += self._receive()
        nonces = nonce + answer[:NONCE]
        if len(answer) > NONCE + DIGEST or not hmac.compare_digest(answer[NONCE:], _mac(secret, b"server", nonces)):
            raise ConnectionError(f"{address}:{port} is not the store of this run: it does not know the run's secret")
        self._socket.sendall(_mac(secret, b"client", nonces))
        self._session = _Session(secret, nonces, b"client", b"server")

    def _receive(self) -> bytes:
        if not (data := self._socket.recv(1 << 20)):
            raise ConnectionError(
                "the run's store closed the connection: the agent of node 0 has ended, or its run has another secret"
            )
        return data

    def _ask(self, *request: Any, timeout: timedelta | None = None) -> Any:
        with self._lock:
            self._socket.settimeout((timeout or self._timeout).total_seconds())
            self._socket.sendall(self._session.pack(request))
            try:
                while not (answers := self._session.unpack(self._receive())):
                    pass
            except TimeoutError as error:
                self._socket.close()  # the late answer must not be taken for that of the next request
                raise dist.DistStoreError(f"timed out: {request}") from error
            return answers[0]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_bytes(value) for value in self._ask("wait", list(keys))]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._ask("find", list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _bytes(self._ask("compare_set", key, _text(expected), _text(desired)))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key)

    def num_keys(self) -> int:
        return self._ask("count")

    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return False

    def abort(self) -> None:
        """Make a pending request fail at once, and every later one; may be called from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def clone(self) -> StoreClient:
        """A second connection, for a thread that must not wait for a pending request of this one."""
        self._clones.append(StoreClient(*self._arguments))  # torch itself keeps only the C++ half alive
        return self._clones[-1]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _bytes(value: str) -> bytes:
    return value.encode("latin-1")
