"""What strangers and careless agents send to the server: each connection and request costs only itself."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.phases.serve import server as server_module
from megarl.phases.serve.conversations import Conversations
from megarl.phases.serve.server import serving
from megarl.recipe.load import load_recipe
from tests.commands.stages.agents import write_agent_model
from tests.commands.stages.test_serve import SETTINGS

KEY = "k" * 40


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


class Running:
    def __init__(self, settings, renderer):
        def engine(turn):
            raise AssertionError("no request of these tests gets as far as the engine")

        self.renderer = renderer
        self.conversations = Conversations(settings, range(2), renderer, str, 0, self.store, {}, frozenset())
        self.context = serving(0, self.conversations, engine, KEY, "m")

    def store(self, name, group):
        raise ValueError("no\nspace")

    def __enter__(self):
        self.port = self.context.__enter__()
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)

    def send(self, method, path, body=None):
        """(status, JSON of the answer) of one request with the key; ``body``: an object, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found

    def ask(self, content, name="x"):
        return self.send("POST", f"/a/{name}/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})


@pytest.fixture(scope="module")
def settings(recipe, tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "model"
    write_agent_model(tiny_model, path)
    return load_recipe(recipe, [f"model.path='{path}'", *SETTINGS])


@pytest.fixture
def running(settings):
    with Running(settings, Tokenizing(settings.data, load_tokenizer(settings.model.path))) as one:
        yield one


def is_closed(connection, seconds):
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_idle_connections_without_a_key_do_not_keep_agents_out(running, monkeypatch):
    """The oldest ones beyond 64 are closed; those with the key are not, however idle."""
    agent = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    for _ in range(2):  # the second request on the same connection, after the flood
        agent.request("GET", "/state", headers={"Authorization": f"Bearer {KEY}"})
        assert agent.getresponse().read()
        idle = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(300)]
        assert all(is_closed(connection, 60) for connection in idle[: 300 - server_module.MAX_STRANGERS])
        assert running.send("GET", "/state")[0] == 200
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
    status, found = running.ask("2" * 20_000_000)
    assert status == 400 and "characters are more than 104 tokens" in found["error"]["message"]
    assert running.renderer.lengths == []


def test_requests_do_not_wait_while_another_is_tokenised(running):
    running.renderer.gate.clear()
    waiting = threading.Thread(target=running.ask, args=("2+3?",))
    waiting.start()
    while not running.renderer.lengths:
        time.sleep(0.01)
    assert running.send("GET", "/state")[0] == 200  # else it times out
    running.renderer.gate.set()
    waiting.join(60)


def test_whatever_is_sent_is_answered_in_one_line(running, capfd):
    lone = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    for path, body, expected in (
        ("/a/x/v1/chat/completions", lone, (400, "surrogates not allowed")),
        ("/a/x/v1/chat/completions", b"[" * 100_000, (400, "nested more than 64 deep")),
        ("/a/x/v1/chat/completions", b'{"n": ' + b"1" * 5_000 + b"}", (400, "digits")),
        ("/a/x/reward", b'{"reward": 1e308}', (400, "finite number of at most 1,000,000")),
        ("/a/x/v1/chat/completions", b"{", (400, "not JSON")),
        (
            "/a/x/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "2"}]}',
            (500, "as far as the engine"),
        ),
    ):
        status, found = running.send("POST", path, body)
        assert (status, "\n" in found["error"]["message"]) == (expected[0], False)
        assert expected[1] in found["error"]["message"]
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert printed.out.splitlines() == [
        "POST '/a/x/v1/chat/completions' failed: AssertionError: no request of these tests gets as far as the engine"
    ]
