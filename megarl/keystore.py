"""The store in which the processes of a run meet: keys and values at the leader, for nobody without the run's secret.

torch's own TCPStore takes orders from whoever reaches its port. Here both ends prove that they know the secret before
anything else is read, and every message carries an HMAC with the connection's key, over direction, number and content:
what is forged, repeated, left out or reordered ends the connection that it came by, and changes nothing.

    client -> server    16 random bytes c
    server -> client    16 random bytes s, HMAC(secret, "server" c s)
    client -> server    HMAC(secret, "client" c s)
    then both ways      length (4 bytes), HMAC(key, direction number body), body;  key = HMAC(secret, "session" c s)

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
SECRET = "MEGARL_STORE_SECRET"  # environment variable of the processes that an agent starts, hexadecimal
HANDSHAKE_SECONDS = 10.0
STRANGERS = 64  # connections that have proved nothing yet; more are closed, the oldest first


def new_secret() -> bytes:
    return secrets.token_bytes(DIGEST)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


class _Session:
    """One end of a connection whose other end has proved itself."""

    def __init__(self, secret: bytes, nonces: bytes, ours: bytes, theirs: bytes) -> None:
        self._key, self._ours, self._theirs = _mac(secret, b"session", nonces), ours, theirs
        self._sent = self._received = 0
        self._data = bytearray()

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        number, self._sent = self._sent, self._sent + 1
        return LENGTH.pack(len(body)) + _mac(self._key, self._ours, number.to_bytes(8), body) + body

    def unpack(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes. ConnectionError for one that is not the other end's next."""
        self._data += data
        messages, start = [], LENGTH.size + DIGEST
        while len(self._data) >= start:
            end = start + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            mac, body = self._data[LENGTH.size : start], bytes(self._data[start:end])
            if not hmac.compare_digest(mac, _mac(self._key, self._theirs, self._received.to_bytes(8), body)):
                raise ConnectionError("a message that the other end did not send")
            self._received += 1
            del self._data[:end]
            messages.append(json.loads(body))
        return messages


@dataclass(eq=False)
class _Peer:
    """A connection of the server."""

    socket: socket.socket
    since: float = field(default_factory=time.monotonic)
    nonces: bytes = b""  # c s, once it has sent c
    received: bytes = b""  # of the handshake
    session: _Session | None = None  # once it has proved itself
    unsent: bytearray = field(default_factory=bytearray)
    awaits: list[str] = field(default_factory=list)  # the keys of its last request, if these are not all there


class StoreServer:
    """Answers clients from a thread, until `close`.

    host: an address to listen on, "" for all of this machine; port: 0 for a free one.
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
                    self._hear(peer)
            self._send_away_strangers()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone, or there are too many open files
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[connection] = _Peer(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _send_away_strangers(self) -> None:
        strangers = [peer for peer in self._peers.values() if not peer.session]
        late = time.monotonic() - HANDSHAKE_SECONDS
        for number, peer in enumerate(strangers):
            if peer.since < late or number < len(strangers) - STRANGERS:
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.socket]
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _hear(self, peer: _Peer) -> None:
        try:
            self._flush(peer)
            data = peer.socket.recv(1 << 20)
            if not data:
                raise ConnectionError
            if peer.session is None:
                data = self._shake_hands(peer, data)
            for request in peer.session.unpack(data) if peer.session else ():
                self._answer(peer, request)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            if peer.socket in self._peers:
                self._drop(peer)

    def _shake_hands(self, peer: _Peer, data: bytes) -> bytes:
        """Returns what follows the handshake."""
        peer.received += data
        if not peer.nonces and len(peer.received) >= NONCE:
            peer.nonces = peer.received[:NONCE] + secrets.token_bytes(NONCE)
            peer.unsent += peer.nonces[NONCE:] + _mac(self._secret, b"server", peer.nonces)
            self._flush(peer)
        if len(peer.received) < NONCE + DIGEST:
            return b""
        proof, rest = peer.received[NONCE : NONCE + DIGEST], peer.received[NONCE + DIGEST :]
        if not hmac.compare_digest(proof, _mac(self._secret, b"client", peer.nonces)):
            raise ConnectionError("it does not know the secret")
        peer.session, peer.received = _Session(self._secret, peer.nonces, b"server", b"client"), b""
        return rest

    def _answer(self, peer: _Peer, request: list[Any]) -> None:
        name, *arguments = request
        if name == "wait":
            peer.awaits = arguments[0]
            self._answer_if_there(peer)
            return
        self._reply(peer, getattr(self, f"_do_{name}")(*arguments))
        if name in ("set", "add", "compare_set"):
            for other in [other for other in self._peers.values() if other.awaits]:
                self._answer_if_there(other)

    def _answer_if_there(self, peer: _Peer) -> None:
        if all(key in self._values for key in peer.awaits):
            keys, peer.awaits = peer.awaits, []
            self._reply(peer, [self._values[key] for key in keys])

    def _reply(self, peer: _Peer, answer: Any) -> None:
        assert peer.session
        peer.unsent += peer.session.pack(answer)
        try:
            self._flush(peer)
        except OSError:  # another peer's request has answered this one, which has gone: its own turn drops it
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
        """As TCPStore: a key that is not there is set where nothing is expected."""
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def _do_delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _do_count(self) -> int:
        return len(self._values)


class StoreClient(dist.Store):
    """A connection to a `StoreServer`, with the methods of torch's stores; one request at a time, from any thread.

    ConnectionError where the server cannot be reached, is another's, or has gone. It must not be garbage collected as
    long as torch uses it.
    """

    def __init__(
        self, address: str, port: int, secret: bytes, timeout: timedelta, connect_seconds: float = HANDSHAKE_SECONDS
    ) -> None:
        super().__init__()
        self._made_with = (address, port, secret, timeout)
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
            raise ConnectionError("the run's store has gone, or does not know this run's secret")
        return data

    def _ask(self, *request: Any, timeout: timedelta | None = None) -> Any:
        with self._lock:
            self._socket.settimeout((timeout or self._timeout).total_seconds())
            self._socket.sendall(self._session.pack(request))
            try:
                while not (answers := self._session.unpack(self._receive())):
                    pass
            except TimeoutError as error:
                self._socket.close()  # whose answer may still come
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

    def give_up(self) -> None:
        """From any thread: a request that waits for its answer fails now, and so does every later one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def clone(self) -> StoreClient:
        """A connection of its own, for a thread that must not wait for this one's."""
        self._clones.append(StoreClient(*self._made_with))  # torch itself keeps only the C++ half alive
        return self._clones[-1]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _bytes(value: str) -> bytes:
    return value.encode("latin-1")
