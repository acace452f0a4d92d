"""What strangers and careless agents send to the server: each connection and request costs only itself."""

import contextlib
import http.client
import socket
import threading
import time

import pytest

from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.phases.serve import server as server_module
from tests.phases.serve.conftest import ASKED, KEY, Server


class Tokenizing(Renderer):
    """Notes how long the texts are that are tokenised, and waits for ``gate`` while it tokenises."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lengths, self.gate = [], threading.Event()
        self.gate.set()

    def chat(self, messages, *arguments):
        self.lengths.append(sum(len(message["content"]) for message in messages))
        self.gate.wait(300)
        return super().chat(messages, *arguments)


@pytest.fixture
def running(settings):
    def engine(turn):
        raise AssertionError("no request of these tests gets as far as the engine")

    renderer = Tokenizing(settings.data, load_tokenizer(settings.model.path))
    with Server(settings, engine, renderer) as one:
        yield one


def state(running):
    return running.http.get(f"{running.address}/state").status_code


def is_closed(connection, seconds):
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_idle_connections_without_a_key_do_not_keep_agents_out(running):
    """The oldest ones beyond 64 are closed; those with the key are not, however idle."""
    agent = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    for _ in range(2):  # the second request on the same connection, after the flood
        agent.request("GET", "/state", headers={"Authorization": f"Bearer {KEY}"})
        assert agent.getresponse().read()
        idle = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(300)]
        assert all(is_closed(connection, 60) for connection in idle[: 300 - server_module.MAX_STRANGERS])
        assert state(running) == 200
        for connection in idle:
            connection.close()
    agent.close()


def test_a_connection_without_a_key_is_closed_even_if_it_keeps_sending(running, monkeypatch):
    monkeypatch.setattr(server_module, "KEY_SECONDS", 1.0)
    begin = time.monotonic()
    slow = socket.create_connection(("127.0.0.1", running.port))
    with slow, contextlib.suppress(ConnectionError):  # it is closed
        slow.sendall(b"GET /state HTTP/1.1\r\n")
        while not is_closed(slow, 0.1):
            assert time.monotonic() - begin < 60
            slow.sendall(b"A: b\r\n")
    assert time.monotonic() - begin >= 0.9


def test_messages_that_cannot_fit_are_refused_before_they_are_tokenised(running):
    found = running.send({"messages": [{"role": "user", "content": "2" * 20_000_000}]})
    assert found.status_code == 400 and "characters are more than 104 tokens" in found.json()["error"]["message"]
    assert running.renderer.lengths == []


def test_requests_do_not_wait_while_another_is_tokenised(running):
    running.renderer.gate.clear()
    waiting = threading.Thread(target=running.send, args=({"messages": ASKED},))
    waiting.start()
    while not running.renderer.lengths:
        time.sleep(0.01)
    assert state(running) == 200  # else it times out
    running.renderer.gate.set()
    waiting.join(60)


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
