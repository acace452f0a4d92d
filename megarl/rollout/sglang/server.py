"""Starts an SGLang server as a child of this process, and speaks HTTP to it on 127.0.0.1."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.rollout import signals
from megarl.rollout.sglang import guard

HOST = "127.0.0.1"
HEALTH_SECONDS = 0.25  # between two health checks of a server that is starting
ANSWER_SECONDS = 10.0  # timeout of `Server.get` and of a health check
QUESTION_SECONDS = 1.0  # between two requests that ask whether a decoding server still answers
CLOSE_SECONDS = 10.0  # how long a server that broke a connection may take to exit, to report its exit code
LOG_LINES = 30  # last lines of the log that an error shows
OWN = ("host", "port", "served-model-name", "config", "api-key")  # arguments that `Server` adds itself
# Variables that the launcher sets for the phase process; SGLang would take them for its own.
NOT_FOR_THE_SERVER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


class ServerFailed(Exception):
    """The server ended or refused a request. If it ended, the message has the last lines of its log."""


def installed_version(python: Path) -> str | None:
    """The version of SGLang installed for the interpreter ``python``; None if there is none.

    Raises OSError if the interpreter cannot be run.
    """
    probe = "from importlib import metadata; print(metadata.version('sglang'))"
    environment = server_environment(python, {})
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, env=environment)
    return found.stdout.strip() if found.returncode == 0 else None


def server_environment(python: Path, settings: dict[str, str]) -> dict[str, str]:
    """This process' environment with ``settings`` added and without the variables that concern only this process."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_FOR_THE_SERVER and not name.startswith("MEGARL_")
    }
    if str(python) != sys.executable:  # these variables point to the packages of this interpreter
        for name in ("PYTHONPATH", "PYTHONHOME"):
            environment.pop(name, None)
    return environment | settings


class Server:
    """A running ``python -m sglang.launch_server``, from its start to `stop`; its output goes to this process' stderr.

    The server and all its descendants end when this process does, however that ends: see `megarl.rollout.sglang.guard`.
    It answers only requests with a random key, which it reads from a file in ``folder`` that only the owner can read,
    because ``ps`` shows everybody the arguments of a process.
    """

    def __init__(self, python: Path, arguments: list[str], settings: dict[str, str], folder: Path) -> None:
        self.port, self._name, self._key = _free_port(), secrets.token_hex(8), secrets.token_hex(32)
        self._tail: deque[str] = deque(maxlen=LOG_LINES)
        self._question: threading.Thread | None = None  # the latest `_ask`, started at the monotonic time `_asked`
        self._asked, self._answered = 0.0, False
        command = [python, "-W", "ignore", signals.__file__, "sglang.launch_server", "--config", self._key_file(folder)]
        command += ["--host", HOST, "--port", self.port, "--served-model-name", self._name]
        self._process = subprocess.Popen(
            [sys.executable, guard.__file__, *map(str, [os.getpid(), *command, *arguments])],
            env=server_environment(python, settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A signal to this process' group must not reach the server. The session stays: see `end_sessions`.
            process_group=0,
        )
        self._log = threading.Thread(target=self._copy_log, daemon=True)
        self._log.start()

    def _key_file(self, folder: Path) -> Path:
        path = folder / "key.yaml"
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            print(f'api-key: "{self._key}"', file=file)
        return path

    def _copy_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError):  # such as a full disk: go on, since the server hangs if nobody reads
                os.write(2, line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_healthy(self) -> None:
        """Wait until the server answers, without a timeout because loading a large model takes minutes.

        Raises `ServerFailed` if it exits.
        """
        while True:
            if not self.alive:
                raise self.failure("did not start")
            try:
                self._request("GET", "/health", timeout=ANSWER_SECONDS).read()
                info = self.get("/model_info")
                if info["served_model_name"] == self._name:  # else another server has taken the port
                    return
            except (OSError, http.client.HTTPException, ServerFailed, ValueError, LookupError, TypeError):
                pass
            time.sleep(HEALTH_SECONDS)

    def get(self, path: str) -> Any:
        """Send a GET request and return the JSON of the answer."""
        return json.loads(self._request("GET", path, timeout=ANSWER_SECONDS).read())

    def answers(self) -> bool:
        """Whether the server, its scheduler included, has answered a request since the last call. Never blocks.

        The request is sent by a background thread, one at a time and without a timeout, at most once a
        `QUESTION_SECONDS`.
        """
        answered, self._answered = self._answered, False
        asking = self._question is not None and self._question.is_alive()
        if not asking and time.monotonic() > self._asked + QUESTION_SECONDS:
            self._asked = time.monotonic()
            self._question = threading.Thread(target=self._ask, daemon=True)
            self._question.start()
        return answered

    def _ask(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ServerFailed):
            self._request("GET", "/server_info").read()
            self._answered = True

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request; return the JSON of the answer, or None if the answer is not JSON.

        Raises `ServerFailed` with the server's message if it refuses, or with its log if it breaks the connection.
        """
        try:
            answer = self._request("POST", path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"broke the connection of {path}") from error
        return json.loads(answer) if answer.startswith((b"{", b"[")) else None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a POST request and yield the JSON of each server-sent event of the answer."""
        try:
            response = self._request("POST", path, body)
            for line in response:
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ServerFailed(f"SGLang refused {path}: {event['error']}")
                    yield event
                elif line == b"data: [DONE]\n":
                    return
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"broke the connection of {path}") from error
        raise self.failure(f"ended the answer to {path} too early")

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)  # ignores proxies
        headers = {"Content-Type": "application/json", "Connection": "close", "Authorization": f"Bearer {self._key}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            said = response.read().decode(errors="replace")
            raise ServerFailed(f"SGLang refused {path} ({response.status}): {said}")
        return response

    def failure(self, what: str) -> ServerFailed:
        """An error that says ``what`` the server did, its exit code if it exited, and the last lines of its log."""
        try:
            code = self._process.wait(CLOSE_SECONDS)
            self._log.join(CLOSE_SECONDS)
            what += f" and ended with exit code {code}"
        except subprocess.TimeoutExpired:
            what += " and still runs"
        return ServerFailed("\n".join([f"the SGLang server {what}; the last lines of its log:", *self._tail]))

    def stop(self) -> None:
        """End the server and wait until all of its processes have ended."""
        self._process.send_signal(guard.END)
        self._process.wait()
        self._log.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
