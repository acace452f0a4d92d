"""The serve phase: one engine answers agents' requests until every group of the stage is stored; then it seals them.

The HTTP server has one thread per connection, on loopback only, for clients with the run's key.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from megarl.data.templates import Renderer
from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED, UserError
from megarl.foreign import parse_json
from megarl.heartbeats import beat
from megarl.phases.evaluate import evaluate_due
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.serve import KEY
from megarl.phases.serve.chat import Refused, decoder
from megarl.phases.serve.conversations import Conversations, Turn
from megarl.phases.stop import StopRequest
from megarl.rollout.engine import Completion, Request, discard, fault, next_seed
from megarl.storage.checked_json import append_json, read_intact_lines
from megarl.storage.files import fsync_path, make_directory
from megarl.storage.rollouts import SERVED, Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

MIN_KEY = 32  # least number of characters: with an empty key everybody would be admitted
IDLE_SECONDS = 0.05  # between two checks of whether the phase must stop
MAX_BODY = 64 << 20  # most bytes of a request's body
KEY_SECONDS = 10.0  # for which a connection that has not shown the key may send nothing
SOCKET_SECONDS = 600.0  # timeout of a client's connection after that, between requests too
Answer = dict[str, Any] | list[dict[str, Any]]  # JSON body; a list: the events of a stream
Ask = Callable[[Turn], Completion | None]  # blocks until the engine has answered; None if it was interrupted
_Asked = tuple[Turn, Future[Completion | None]]


class TurnQueue:
    """Queue of the turns that agents ask for, first in, first out; the engine takes one when it has room for it.

    over: returns True once no more turns must be generated.
    """

    def __init__(self, worker: RolloutWorker, over: Callable[[], bool]) -> None:
        self._worker, self._over = worker, over
        self._waiting: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._taken: dict[int, _Asked] = {}

    def ask(self, turn: Turn) -> Completion | None:
        """Queue a turn and wait for its answer; None if the engine was interrupted. Called by the server's threads."""
        found: Future[Completion | None] = Future()
        self._waiting.put((turn, found))
        while True:
            with contextlib.suppress(TimeoutError):
                return found.result(IDLE_SECONDS)
            if self._over() and not self._taken:
                return None  # it was queued after the engine had ended

    def run(self, stop: Callable[[], bool]) -> None:
        """Generate turns until ``over``; once ``stop`` returns True, those being generated are dropped, too.

        An answer that the engine returned wrongly is generated again; `EngineFault` if that happens too often.
        """
        engine, taken = self._worker.engine, 0
        while not self._over() or (engine.decoding and not stop()):
            if not self._over() and engine.has_room() and (job := self._next(wait=not engine.decoding)):
                beat("turn", f"turn {taken + 1}")
                self._taken[taken], (turn, _) = job, job
                seed = next_seed(turn.seed, turn.discarded)
                draws = self._worker.sampling(samples=1, max_tokens=turn.limit, seeds=(seed,))
                engine.submit(taken, Request([turn.prompt], draws))
                taken += 1
            elif engine.decoding:
                self._answer(engine.step())
        self._answer(engine.interrupt())

    def _next(self, wait: bool) -> _Asked | None:
        """The next job; None if there is none. wait: for a moment."""
        try:
            return self._waiting.get(timeout=IDLE_SECONDS) if wait else self._waiting.get_nowait()
        except queue.Empty:
            if wait:
                beat("idle", "wait for requests of agents")  # not for other processes
            return None

    def _answer(self, completions: list[tuple[int, Completion]]) -> None:
        """Pass completions to the threads that wait for them."""
        for number, completion in completions:
            turn, found = self._taken.pop(number)
            if completion.finish_reason == "interrupted":
                found.set_result(None)
            elif why := fault(completion, turn.limit, self._worker.vocabulary):
                turn.discarded = discard(why, "the answer to an agent", turn.discarded)
                self._waiting.put((turn, found))
            else:
                found.set_result(completion)


def serve(stage: Stage) -> None:
    """Fill ``stage`` with the conversations of agents and seal it. Groups that an earlier attempt stored are kept."""
    stop = StopRequest()
    if stage.is_sealed():
        return
    replicas = ReplicaGroup.join(while_waiting=stop.exit_if_asked)
    make_directory(stage.rollouts)
    worker = evaluate_due(stage, replicas, stop)
    names = stage.rollouts / SERVED
    with RolloutWriter(
        stage.rollouts, weights_hash=worker.weights_hash, logprob_mode="processed", external=True
    ) as writer:

        def store(name: str, group: Group) -> None:
            append_json(names, {"group": name, "number": group.group_id})
            fsync_path(names)  # before the group, which after a restart could not be identified without its name
            writer.append([group])

        conversations = Conversations(
            stage.run.recipe,
            stage.groups,
            Renderer(stage.run.recipe.data, worker.tokenizer),
            decoder(worker.tokenizer),
            stage.first_update,
            store,
            _stored(stage, names),
            worker.prompts.banned,
        )
        _answer(stage, worker, conversations, stop)
    worker.close()
    if not conversations.complete:
        sys.exit(STOPPED)
    seal(stage.rollouts, stage.groups, external=True)


def _stored(stage: Stage, names: Path) -> dict[str, int]:
    """{name: id} of the stored groups. A name without a group is left out: a kill came before the group was stored."""
    there = set(RolloutStore(stage.rollouts).group_ids)
    lines = read_intact_lines(names)[0] if names.exists() else []
    found = {line["number"]: line["group"] for line in lines if line["number"] in there}
    return {name: number for number, name in found.items()}


def _answer(stage: Stage, worker: RolloutWorker, conversations: Conversations, stop: StopRequest) -> None:
    """Serve requests until the stage is complete or the phase is told to stop."""
    root, turns = stage.run.root, TurnQueue(worker, lambda: stop.asked or conversations.complete)
    key = (root / KEY).read_text().strip()
    if len(key) < MIN_KEY:
        raise UserError(f"{root / KEY} holds no key of at least {MIN_KEY} characters: delete it, and start again")
    with serving(stage.run.read_request()["port"], conversations, turns.ask, key, root.name) as port:
        stage.log_event("serving", phase="serve", url=f"http://127.0.0.1:{port}")
        turns.run(lambda: stop.asked)


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
        turn = self.server.conversations.begin(group, name, body)
        if turn.completion is None:
            self.server.conversations.end(turn, self.server.ask(turn))
        return _completion(self.server.model, turn)


def _completion(model: str, turn: Turn) -> dict[str, Any]:
    """The answer as a ChatCompletion object of OpenAI's API."""
    message, completion = turn.answer, turn.completion
    assert message is not None and completion is not None
    reason = "length" if completion.finish_reason != "stop" else "tool_calls" if "tool_calls" in message else "stop"
    shown = {**message, "content": message["content"] or None} if "tool_calls" in message else message
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": shown, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(completion.tokens),
            "total_tokens": len(turn.prompt) + len(completion.tokens),
        },
    }


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
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    return [*chunks, shared | {"choices": [], "usage": found["usage"]}] if wants_usage else chunks
