"""The store of a run behaves like torch's for clients that know the secret, and refuses all others."""

import multiprocessing
import signal
import socket
import struct
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl import distributed, keystore
from megarl.distributed import PHASE_ID
from megarl.keystore import (
    DIGEST,
    MAX_UNAUTHENTICATED,
    NONCE,
    SECRET,
    StoreClient,
    StoreServer,
    _Session,
    new_secret,
)

TIMEOUT = timedelta(minutes=10)  # processes that import torch may come late


@pytest.fixture
def secret():
    return new_secret()


@pytest.fixture
def server(secret):
    server = StoreServer(secret)
    yield server
    server.close()


@pytest.fixture
def client(server, secret):
    return StoreClient("127.0.0.1", server.port, secret, TIMEOUT)


def test_it_answers_like_torchs_own_store(client):
    """The same calls on both, through the prefixes that phases use."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    theirs = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    results = []
    for store in (theirs, client):
        store = dist.PrefixStore("phase1", dist.PrefixStore("megarl", store))
        store.set("a", "1")
        store.set("b", bytes(range(256)))
        found = [store.get("a"), store.get("b"), store.check(["a"]), store.check(["a", "c"])]
        found += [store.add("n", 3), store.add("n", -1), store.get("n"), store.compare_set("a", "1", "2")]
        found += [store.compare_set("a", "1", "3"), store.compare_set("new", "", "x"), store.get("new")]
        found += [store.delete_key("a"), store.delete_key("a"), store.check(["a"]), store.wait(["b", "n"])]
        found += [store.num_keys() > 0]
        results.append(found)
    assert results[0] == results[1]


def test_a_wait_ends_when_the_last_key_is_set_or_after_its_timeout(client):
    got = []
    other = client.clone()
    thread = threading.Thread(target=lambda: got.append(other.multi_get(["x", "y"])))
    thread.start()
    client.set("x", "1")
    assert not client.check(["y"])
    client.add("y", 5)
    thread.join(60)
    assert got == [[b"1", b"5"]]
    with pytest.raises(dist.DistStoreError, match="timed out"):
        client.wait(["never"], timedelta(seconds=0.01))


def test_large_values_and_many_clients(client):
    value = b"\xff" * 3_000_000
    client.set("large", value)
    clients = [client.clone() for _ in range(2 * MAX_UNAUTHENTICATED)]
    numbers = [other.add("next", 1) for other in clients for _ in range(3)]
    assert numbers == list(range(1, 6 * MAX_UNAUTHENTICATED + 1))
    assert clients[-1].get("large") == value


def all_reduce(port, secret, rank, results):
    store = StoreClient("127.0.0.1", port, secret, TIMEOUT)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=2)
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    dist.all_reduce(value, group=dist.new_group([0, 1]))
    results.put(value.item())
    dist.destroy_process_group()


def test_torchs_process_groups_can_use_it(server, secret):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=all_reduce, args=(server.port, secret, rank, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert [results.get(timeout=900) for _ in ranks] == [6.0, 6.0]
    for rank in ranks:
        rank.join()


def test_what_torch_writes_below_its_prefixes_stays_within_an_attempt_at_a_phase(server, secret, monkeypatch):
    """An NCCL error is written to the store below all prefixes, where every NCCL group of a later attempt polls it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv(SECRET, secret.hex())
    stores = []
    for attempt in ("phase1", "phase2"):
        monkeypatch.setenv(PHASE_ID, attempt)
        stores.append(dist.PrefixStore("torch", distributed._phase_store()))
    stores[0]._underlying_non_prefix_store.set("exception_dump", "1")
    assert stores[0]._underlying_non_prefix_store.check(["exception_dump"])
    assert not stores[1]._underlying_non_prefix_store.check(["exception_dump"])
    stores[1].set("a", "1")
    assert stores[1].check(["a"]) and not stores[0].check(["a"])


def test_a_malformed_request_ends_the_connection_of_its_client_alone(server, client):
    for request in (["unknown"], ["set"], [], 1, ["add", "a", "x"], ["wait", 1], ["set", [], 1], {"a": 1}):
        with pytest.raises(ConnectionError):
            client.clone()._ask(*request) if isinstance(request, list) else send(client.clone(), request)
    client.set("a", "1")
    assert client.get("a") == b"1"


def send(client, message):
    client._socket.sendall(client._session.pack(message))
    client._receive(1)


def test_a_client_that_dies_while_it_waits_is_let_go(server, client, monkeypatch):
    monkeypatch.setattr(keystore, "GONE_SECONDS", 0.01)
    waits = client.clone()
    waits._socket.sendall(waits._session.pack(["wait", ["never"]]))
    waits._socket.shutdown(socket.SHUT_WR)
    assert closed(waits._socket) == b""


def closed(connection):
    """Wait until the other end has closed the connection; returns what it sent before."""
    connection.settimeout(60)
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


def test_connections_without_the_secret_are_refused(server, client):
    for wrong in (new_secret(), b""):
        with pytest.raises(ConnectionError, match="does not know the run's secret"):
            StoreClient("127.0.0.1", server.port, wrong, TIMEOUT)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:  # sends a request with a wrong proof
        session = _Session(b"guess", bytes(2 * NONCE), b"client", b"server")
        stranger.sendall(bytes(NONCE) + bytes(DIGEST) + session.pack(["set", "order/1", "{}"]))
        closed(stranger)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:  # sends the server's own proof
        stranger.sendall(bytes(NONCE))
        answer = b""
        while len(answer) < NONCE + DIGEST:
            answer += stranger.recv(1024)
        stranger.sendall(answer[NONCE:])
        closed(stranger)
    assert not client.check(["order/1"]) and client.num_keys() == 0


class Relay:
    """Forwards data between a client and the server; ``tamper`` may change what goes to the server."""

    def __init__(self, port, tamper):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._to, self._tamper = self.listener.getsockname()[1], port, tamper
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self._to))
        threading.Thread(target=self._copy, args=(server, client, lambda data: data), daemon=True).start()
        self._copy(client, server, self._tamper)

    def _copy(self, source, target, change):
        try:
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        except OSError:
            pass
        target.close()


@pytest.mark.parametrize(
    "tamper",
    [
        lambda data: data.replace(b'"7"', b'"8"'),
        lambda data: data + data if b'"7"' in data else data,
        lambda data: b"" if b'"6"' in data else data,
        lambda data: data.replace(struct.pack(">I", len(b'["set", "a", "7"]')), struct.pack(">I", 1 << 31)),
    ],
    ids=["changed", "repeated", "left out", "endless"],
)
def test_a_message_that_is_changed_on_its_way_ends_the_connection(server, client, secret, tamper):
    relay = Relay(server.port, tamper)
    between = StoreClient("127.0.0.1", relay.port, secret, TIMEOUT)
    between.set_timeout(timedelta(seconds=2))  # for the answer to a request that was left out
    with pytest.raises((OSError, RuntimeError)):  # noqa: PT012 - any of the requests may notice it
        between.set("a", "6")
        between.set("a", "7")
        between.set("b", "9")
        between.check(["a"])
        raise AssertionError("nobody noticed")
    value = client.get("a") if client.check(["a"]) else None
    assert value in (None, b"6", b"7") and not client.check(["b"])


def test_clients_that_send_nothing_cannot_use_up_the_connections(server, client):
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_UNAUTHENTICATED + 10)]
    for stranger in strangers[:10]:
        assert closed(stranger) == b""
    client.clone().set("a", "1")
    assert client.get("a") == b"1"
    for stranger in strangers:
        stranger.close()


def test_clients_notice_that_the_server_has_ended(server, secret, client):
    client.set("a", "1")
    waits = client.clone()
    noticed = []

    def wait():
        try:
            waits.get("b")
        except OSError as error:
            noticed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    server.close()
    thread.join(60)
    assert len(noticed) == 1
    with pytest.raises(ConnectionError):
        client.multi_get(["a"])


def test_a_stop_signal_during_a_request_leaves_later_answers_in_place(client):
    """The answer that it interrupts is not taken for the next one, and the stop can still be reported."""

    def ask_until_stopped(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for count in range(10**6):
            client.set("a", str(count))
            assert client.get("a") == str(count).encode()
            client.check(["b"])

    other = client.clone()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for number in range(1, 21):
        with pytest.raises(KeyboardInterrupt):
            ask_until_stopped(0.0005 * number)
        client.set("stopped", str(number))
        assert client.get("stopped") == str(number).encode() == other.get("stopped")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
