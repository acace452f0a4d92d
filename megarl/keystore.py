"""The key-value store that the processes of a run share; the leader hosts it.

torch's own TCPStore obeys whoever reaches its port. Here both ends prove that they know the run's secret before
anything else is read, and every message carries an HMAC with the connection's key over direction, sequence number and
content: a forged, repeated, omitted, reordered or malformed message ends its connection and changes nothing.
(`multiprocessing.connection` proves the secret too, but its messages are pickles without an HMAC, and a client that
never answers its challenge keeps all others out.)

    client -> server    16 random bytes c
    server -> client    16 random bytes s, HMAC(secret, "server" c s)
    client -> server    HMAC(secret, "client" c s)
    then both ways      length (4 bytes), HMAC(key, sender number body), body;  key = HMAC(secret, "session" c s)

``sender`` is "client" or "server", ``number`` counts the sender's messages from 0 (8 bytes), ``body`` is JSON.

Values are not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

NONCE, DIGEST = 16, 32  # bytes
LENGTH = struct.Struct(">I")
HEAD = LENGTH.size + DIGEST  # bytes of a message before its body
SECRET = "MEGARL_STORE_SECRET"  # environment variable by which an agent gives its processes the secret, hexadecimal
HANDSHAKE_SECONDS = 10.0
GONE_SECONDS = 5.0  # how often the server looks whether a client that waits for keys is still there
MAX_UNAUTHENTICATED = 64  # connections whose handshake is not complete; beyond that the oldest ones are closed
BACKLOG = 256  # connections that wait to be accepted


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

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        number, self._sent = self._sent, self._sent + 1
        return LENGTH.pack(len(body)) + _mac(self._key, self._ours, number.to_bytes(8), body) + body

    def unpack(self, head: bytes, body: bytes) -> Any:
        """The message; ConnectionError if it is not the next one of the other end."""
        mac = _mac(self._key, self._theirs, self._received.to_bytes(8), body)
        if not hmac.compare_digest(head[LENGTH.size :], mac):
            raise ConnectionError("received a message with a wrong HMAC: the other end did not send it, or not now")
        self._received += 1
        return json.loads(body)


class StoreServer:
    """Serves clients from a thread of its own until `close`.

    host: the address to listen on, "" for all addresses of this machine. port: 0 picks a free one.
    """

    def __init__(self, secret: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        self.port = self._listener.getsockname()[1]
        self._secret = secret
        self._values: dict[str, str] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # clients that are not authenticated, oldest first
        self._loop = asyncio.new_event_loop()
        self._changed, self._closed = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # in the end it cancels what serves clients
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._serve_client, sock=self._listener, backlog=BACKLOG)
        await self._closed.wait()
        server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # whatever is wrong with a client ends its connection alone; asyncio would print a cancellation by `close`
            with contextlib.suppress(Exception, asyncio.CancelledError):
                session = await self._authenticate(reader, writer)
                while True:
                    head = await reader.readexactly(HEAD)
                    request = session.unpack(head, await reader.readexactly(LENGTH.unpack_from(head)[0]))
                    if request[0] == "wait":
                        await self._wait(request[1], reader, writer)
                    writer.write(session.pack(self._answer(*request)))
                    await writer.drain()
        finally:
            self._strangers.pop(writer, None)
            writer.transport.abort()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Session:
        self._strangers[writer] = None
        if len(self._strangers) > MAX_UNAUTHENTICATED:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            nonces = await reader.readexactly(NONCE) + secrets.token_bytes(NONCE)
            writer.write(nonces[NONCE:] + _mac(self._secret, b"server", nonces))
            proof = await reader.readexactly(DIGEST)
        if not hmac.compare_digest(proof, _mac(self._secret, b"client", nonces)):
            raise ConnectionError("the client does not know the secret")
        del self._strangers[writer]
        return _Session(self._secret, nonces, b"server", b"client")

    async def _wait(self, keys: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Return once all keys are set; ConnectionError if the client has gone."""
        while not all(key in self._values for key in keys):
            if reader.at_eof() or writer.is_closing():
                raise ConnectionError
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GONE_SECONDS):
                    await self._changed.wait()

    def _answer(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self, f"_do_{name}")(*arguments)
        if name in ("set", "add", "compare_set"):
            self._changed.set()
            self._changed = asyncio.Event()
        return answer

    def _do_set(self, key: str, value: str) -> None:
        self._values[key] = value

    def _do_wait(self, keys: list[str]) -> list[str]:
        return [self._values[key] for key in keys]

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

    prefix: put before every key. torch asks a PrefixStore for the store below it and writes there too: the report of an
    NCCL error, which every NCCL group polls. So processes that must not see each other's keys need another prefix here.

    Raises ConnectionError if the server cannot be reached, belongs to another run, or has gone. Keep a reference to it
    as long as torch uses it: torch keeps only the C++ half alive.
    """

    timeout: timedelta  # a property of torch's class, which torch's stubs lack

    def __init__(self, address: str, port: int, secret: bytes, timeout: timedelta, prefix: str = "") -> None:
        super().__init__()
        self._arguments = (address, port, secret, timeout, prefix)
        self.set_timeout(timeout)
        self._prefix, self._lock = prefix, threading.Lock()
        self._clones: list[StoreClient] = []
        self._connect()

    def _connect(self) -> None:
        address, port, secret, *_ = self._arguments
        self._socket = socket.create_connection((address, port), timeout=HANDSHAKE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = self._socket.makefile("rb")
        nonce = secrets.token_bytes(NONCE)
        self._socket.sendall(nonce)
        answer = self._receive(NONCE + DIGEST)
        nonces = nonce + answer[:NONCE]
        if not hmac.compare_digest(answer[NONCE:], _mac(secret, b"server", nonces)):
            raise ConnectionError(f"{address}:{port} is not the store of this run: it does not know the run's secret")
        self._socket.sendall(_mac(secret, b"client", nonces))
        self._session = _Session(secret, nonces, b"client", b"server")

    def _receive(self, size: int) -> bytes:
        if len(data := self._received.read(size)) < size:
            raise ConnectionError(
                "the run's store closed the connection: the agent of node 0 has ended, or its run has another secret"
            )
        return data

    def _ask(self, *request: Any, timeout: timedelta | None = None) -> Any:
        with self._lock:
            self._socket.settimeout((timeout or self.timeout).total_seconds())
            try:
                self._socket.sendall(self._session.pack(request))
                head = self._receive(HEAD)
                return self._session.unpack(head, self._receive(LENGTH.unpack_from(head)[0]))
            except BaseException as error:
                self.abort()  # a late answer must not be taken for that of the next request
                if isinstance(error, TimeoutError):
                    raise dist.DistStoreError(f"timed out: {request}") from error
                if not isinstance(error, Exception):  # a stop signal, which is still to be reported through the store
                    with contextlib.suppress(OSError):
                        self._connect()
                raise

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", self._prefix + key, _text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_bytes(value) for value in self._ask("wait", self._keys(keys))]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", self._keys(keys), timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._ask("find", self._keys(keys))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", self._prefix + key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _bytes(self._ask("compare_set", self._prefix + key, _text(expected), _text(desired)))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", self._prefix + key)

    def num_keys(self) -> int:
        return self._ask("count")

    deleteKey, getNumKeys = delete_key, num_keys

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
