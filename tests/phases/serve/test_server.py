"""What strangers and careless agents send to the server: each connection and request costs only itself."""

import socket

import pytest

from megarl.phases.serve import phase
from tests.phases.serve.conftest import Server


@pytest.fixture
def running(settings):
    def engine(turn):
        raise AssertionError("no request of these tests gets as far as the engine")

    with Server(settings, engine) as one:
        yield one


def test_an_idle_connection_without_a_key_is_closed(running, monkeypatch):
    monkeypatch.setattr(phase._Handler, "timeout", 0.5)
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as idle:
        idle.sendall(b"GET /state HTTP/1.1\r\n")
        assert idle.recv(1) == b""


def test_whatever_is_sent_is_answered_in_one_line(running, capfd):
    chat = "v1/chat/completions"
    for path, body, status, words in (
        (chat, rb'{"messages": [{"role": "user", "content": "\ud800"}]}', 400, "surrogates not allowed"),
        (chat, b"[" * 100_000, 400, "nested more than 64 deep"),
        (chat, b'{"n": ' + b"1" * 5_000 + b"}", 400, "digits"),
        ("reward", b'{"reward": 1e308}', 400, "finite number of at most 1,000,000"),
        (chat, b"{", 400, "not JSON"),
        (chat, b'{"messages": [{"role": "user", "content": "2"}]}', 500, "as far as the engine"),
    ):
        found = running.send(body, path=path)
        message = found.json()["error"]["message"]
        assert (found.status_code, "\n" in message, words in message) == (status, False, True), message
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert printed.out.splitlines() == [
        "POST '/a/x/v1/chat/completions' failed: AssertionError: no request of these tests gets as far as the engine"
    ]
