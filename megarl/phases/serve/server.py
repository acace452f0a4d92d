"""The HTTP server of the serve phase: one thread per connection, on loopback only, for clients with the run's key."""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from megarl.errors import UserError
from megarl.foreign import parse_json
from megarl.phases.serve.chat import Refused
from megarl.phases.serve.conversations import Conversations, LastAnswer, Turn
from megarl.rollout.engine import Completion

MAX_BODY = 64 << 20  # most bytes of a request's body
KEY_SECONDS = 10.0  # for which a connection that has not shown the key may send nothing
SOCKET_SECONDS = 600.0  # timeout of a client's connection after that, between requests too
Answer = dict[str, Any] | list[dict[str, Any]]  # JSON body; a list: the events of a stream
Ask = Callable[[Turn], Completion | None]  # blocks until the engine has answered; None if it was interrupted


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # agents that may connect at the same time

    def __init__(self, port: int, conversations: Conversations, ask: Ask, key: str, model: str) -> None:
        self.conversations, self.ask, self.key, self.model = conversations, ask, key, model
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a connection that broke; other errors are answered in `_Handler`."""


@contextlib.contextmanager
def serving(port: int, conversations: Conversations, ask: Ask, key: str, model: str) -> Iterator[int]:
    """Serve requests inside the context; yields the port. `UserError` if the port is taken.

    port: 0 for any free one. key: the API key that clients must send. model: name of the model in answers.
    """
    try:
        server = _Server(port, conversations, ask, key, model)
    except OSError as error:
        raise UserError(f"cannot listen on --port {port}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """``/GROUP/CONVERSATION/v1`` is the base URL of a conversation; ``/GROUP/CONVERSATION/reward`` ends it."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = KEY_SECONDS

    def log_message(self, *_: Any) -> None:
        """Log nothing: errors are sent to the client, and events.jsonl records what the phase does."""

    def do_GET(self) -> None:
        try:
            self._check_key()
            body = self._body()
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            status, found = 200, self._answer(self.command, parts, body)
            if isinstance(found, list):
                kind, data = "text/event-stream", "".join(f"data: {json.dumps(one)}\n\n" for one in found).encode()
                return self._send(200, kind, data + b"data: [DONE]\n\n")
        except Refused as error:
            if error.status in (401, 413):  # the request's body was not read
                self.close_connection = True
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            status, found = error.status, {"error": {"message": str(error), "type": kind, "code": error.status}}
        except Exception as error:  # such as a full disk; the client can repeat the request
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            print(f"{self.command} {self.path[:200]!a} failed: {message}", flush=True)
            status, found = 500, {"error": {"message": message, "type": "server_error", "code": 500}}
        return self._send(status, "application/json", json.dumps(found).encode())

    do_POST = do_DELETE = do_GET

    def _send(self, status: int, kind: str, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the agent has gone
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or int(length) > MAX_BODY:
            raise Refused(413, f"a request needs a Content-Length of at most {MAX_BODY >> 20} MiB")
        data = self.rfile.read(int(length))
        try:
            return parse_json(data) if data else None
        except ValueError as error:
            raise Refused(400, f"the request is not JSON: {error}") from error

    def _check_key(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.server.key.encode()):
            raise Refused(401, "wrong API key: the right one is in the file serve.key of the run directory")
        self.connection.settimeout(SOCKET_SECONDS)

    def _answer(self, method: str, parts: list[str], body: Any) -> Answer:
        conversations = self.server.conversations
        match (method, parts):
            case "GET", ["state"]:
                return conversations.state()
            case "GET", [_, _, "v1", "models"]:
                model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "megarl"}
                return {"object": "list", "data": [model]}
            case "POST", [group, name, "v1", "chat", "completions"]:
                found = self._complete(group, name, body)
                return _chunks(found, body) if body.get("stream") else found
            case "POST", [group, name, "reward"]:
                conversations.reward(group, name, body)
                return {"stored": group in conversations.state()["stored"]}
            case "DELETE", [group, name]:
                conversations.drop(group, name)
                return {}
        raise Refused(404, f"{method} /{'/'.join(parts)[:200]} does not exist: docs/stages.md lists all requests")

    def _complete(self, group: str, name: str, body: Any) -> dict[str, Any]:
        found = self.server.conversations.begin(group, name, body)
        if isinstance(found, Turn):
            found = self.server.conversations.end(found, self.server.ask(found))
        return _completion(self.server.model, found, body, self.server.conversations.decode)


def _completion(
    model: str, found: LastAnswer, body: Mapping[str, Any], decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """The answer as a ChatCompletion object of OpenAI's API, with log-probs and token ids if the request ``body`` asks.

    Token ids have the names that vLLM's server gives them.
    """
    message, completion = found.message, found.completion
    reason = "length" if completion.finish_reason != "stop" else "tool_calls" if "tool_calls" in message else "stop"
    tokens, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
    shown = {**message, "content": message["content"] or None} if "tool_calls" in message else message
    choice: dict[str, Any] = {"index": 0, "message": shown, "finish_reason": reason, "logprobs": None}
    if body.get("logprobs"):
        texts = [decode([token]) for token in tokens]  # "" of special tokens, which content lacks too
        content = [
            # a part of a character has no text of its own
            {"token": x, "logprob": p, "bytes": None if "\ufffd" in x else list(x.encode()), "top_logprobs": []}
            for x, p in zip(texts, logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    completed: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(found.prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(found.prompt) + len(tokens),
        },
    }
    if body.get("return_token_ids"):
        choice["token_ids"], completed["prompt_token_ids"] = tokens, found.prompt
    return completed


def _chunks(found: dict[str, Any], body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer as events of a stream, with the whole message in one: it is only sent once the turn is recorded."""
    (choice,) = found["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    first = choice | {"delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    del first["message"]
    shared = {key: found[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [shared | {"choices": [first]}, shared | {"choices": [last]}]
    if "prompt_token_ids" in found:
        chunks[0]["prompt_token_ids"] = found["prompt_token_ids"]
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    return [*chunks, shared | {"choices": [], "usage": found["usage"]}] if wants_usage else chunks
