"""SGLang as a server process beside this one."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.beats import beat
from megarl.data.tokenizer import end_of_sequence
from megarl.errors import UserError
from megarl.models import family_of
from megarl.models.feed_forward import MixtureOfExperts
from megarl.models.hf_config import read_hf_config
from megarl.models.sink_attention import SinkAttention
from megarl.recipe.tables import Recipe
from megarl.rollout.continuous import ContinuousEngine, Running, Settings, check_table, checked_experts, out_of_memory
from megarl.rollout.engine import Completion, Request, RolloutEngine, Sampling, check_request, response_seed, section
from megarl.rollout.gpus import replica_gpus
from megarl.rollout.options import as_arguments, check_options
from megarl.rollout.sglang.server import OWN, Server, ServerFailed, installed_version, server_environment

RECORDS_EXPERTS = frozenset({"cpu", "cuda"})
COLD_START = True
TEMPERATURES = (1e-6, float("inf"))  # below, SGLang takes the most likely token
POLL_SECONDS = 0.1  # longest wait for an event before `interrupted` and the time limits are looked at again
IDLE_SECONDS = 60  # in which a server that has sent all responses lets go of them
WHOLE_RESPONSE = 1 << 30  # tokens between two events of a response: only its first token and its end are reported
# positions that SGLang wants beyond those of a response at full length; without them it ends the response early
SPARE_POSITIONS = 8
_SHORT_OF_MEMORY = re.compile("out of memory|not enough memory|memory pool size is too small", re.IGNORECASE)
_PARSER = """
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # a replica lives on one node
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare positions, which no request ever reaches
}


@dataclass(frozen=True)
class SglangSettings(Settings):
    python: Path = Path(sys.executable)  # interpreter that has SGLang


def check(recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
    """`UserError` if the interpreter for SGLang has none, or for what SGLang does not serve.

    That are temperatures, GPUs, and on a CPU some kinds of layers.
    """
    python = recipe.rollout.sglang_python or Path(sys.executable)
    try:
        found = installed_version(python) is not None
    except OSError as error:
        raise UserError(f"[rollout] sglang_python: {python} cannot be run: {error.strerror}") from error
    if not found:
        raise UserError(
            f"{section(recipe, stage)} engine = 'sglang', but {python} has no SGLang: install it in an environment of "
            "its own and name its interpreter in [rollout] sglang_python (docs/rollout_engines.md)"
        )
    check_table(recipe, stage, TEMPERATURES)
    settings = SglangSettings.of(recipe, stage, python=python)
    own = server_arguments(recipe.model.path, 0, settings) + as_arguments(dict.fromkeys(OWN, 0))
    if recipe.actor.backend == "cpu" and (layers := _absent_on_cpus(hf)):
        raise UserError(f"{section(recipe, stage)} engine = 'sglang' on a CPU has no {layers}; use 'builtin'")
    check_options("sglang", settings.options, own, python, _PARSER, server_environment(python, {}))


def _absent_on_cpus(hf: dict[str, Any]) -> str | None:
    """The layers of the model that SGLang 0.5.23 has in kernels for GPUs alone, or for CPUs with AMX units."""
    family = family_of(hf)
    if isinstance(family.attention, SinkAttention):  # refused by its `model_hook.py`
        return "attention with sinks"
    feed_forward = family.feed_forward
    if (
        isinstance(feed_forward, MixtureOfExperts) and feed_forward.shared_gate is not None
    ):  # Triton's, in its `qwen2_moe.py`, of the later families too
        return "shared expert with a gate"
    return None


def build(recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool) -> RolloutEngine:
    """See `EngineModule`."""
    python = recipe.rollout.sglang_python or Path(sys.executable)
    settings = SglangSettings.of(recipe, stage, python=python, routed_experts=routed_experts)
    return SglangEngine(policy_dir, version, settings)


class SglangEngine(ContinuousEngine):
    """A `RolloutEngine` on an SGLang server.

    ``policy_dir`` is a local directory with config.json and safetensors. A server that dies is a `ServerFailed` with
    the end of its log, one that lacks memory a `UserError` that names the settings.
    """

    settings: SglangSettings

    def __init__(self, policy_dir: Path, version: int, settings: SglangSettings) -> None:
        super().__init__(policy_dir, version, settings)
        self._asleep = False
        self._events: queue.Queue[Any] = queue.Queue()  # of the current `serve`
        self._hf, self._own_stops = read_hf_config(self.policy_dir), end_of_sequence(self.policy_dir)
        arguments = server_arguments(self.policy_dir, version, settings) + as_arguments(settings.options)
        self._meeting = tempfile.TemporaryDirectory(prefix="megarl-")  # where the server's processes find each other
        environment = _environment(settings) | {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._meeting.name}/store"
        }
        self._server = Server(settings.python, arguments, environment, Path(self._meeting.name))
        try:
            with _memory_errors("starting", settings):
                self._server.wait_until_healthy()
            self.cache_tokens = self._server.get("/server_info")["max_total_num_tokens"]
        except BaseException:
            self.close()
            raise

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """In place, so the model must have the same architecture; a directory that SGLang cannot load is a `UserError`.

        Cached prefixes of the previous weights are dropped.
        """
        hf = read_hf_config(policy_dir)
        if self._asleep:
            self._server.post("/resume_memory_occupation", {})
            self._asleep = False
        self._wait_until_idle()
        body = {"model_path": str(policy_dir), "weight_version": str(version), "flush_cache": True}
        try:
            self._server.post("/update_weights_from_disk", body)
        except ServerFailed as error:
            if not self._server.alive:
                raise
            raise UserError(f"SGLang cannot load the policy in {policy_dir}: {error}") from error
        self._hf, self._own_stops = hf, end_of_sequence(policy_dir)
        self.policy_dir, self.version = Path(policy_dir), version

    def renew(self) -> bool:
        """It loads weights in place by the same code as when it starts."""
        return False

    def checksum(self) -> str | None:
        ranks = self._server.post("/weights_checker", {"action": "checksum"})["ranks"]
        return hashlib.sha256(json.dumps([rank["checksums"] for rank in ranks], sort_keys=True).encode()).hexdigest()

    def sleep(self) -> None:
        """On a GPU only the server's processes and its CUDA context stay; a server on a CPU frees nothing."""
        if not self._asleep:
            self._wait_until_idle()
            self._server.post("/release_memory_occupation", {})
            self._asleep = True

    def _wait_until_idle(self) -> None:
        """The server may still hold a response that it has sent, and then neither loads weights nor frees memory."""
        self._server.post(f"/flush_cache?timeout={IDLE_SECONDS}", {})

    def wake(self) -> None:
        """The memory for the weights comes back empty, so they are read again."""
        if self._asleep:
            self.load_weights(self.policy_dir, self.version)

    def close(self) -> None:
        self._server.stop()
        self._meeting.cleanup()

    def _begin(self) -> None:
        """Threads of an earlier call may still have something to say; nobody listens to their queue any more."""
        self._events = queue.Queue()

    def _check(self, request: Request) -> None:
        """SGLang's CPU build dies of a token outside the vocabulary, so nothing is sent unchecked."""
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() before serve()")
        check_request(request.prompts, request.sampling, self._hf["vocab_size"], self.settings.context)
        stops = set(request.sampling.stop_token_ids)
        if stops and (more := self._own_stops - stops):
            raise UserError(
                f"stop tokens {sorted(stops)} lack {sorted(more)} of {self.policy_dir}, at which SGLang ends a "
                "response anyway (eos_token_id of config.json or generation_config.json)"
            )

    def _send(self, responses: dict[str, Running], sampling: Sampling) -> None:
        """Each begins with the event of its first token."""
        body = {
            "rid": list(responses),
            "input_ids": [response.tokens for response in responses.values()],
            "sampling_params": [_parameters(sampling, response) for response in responses.values()],
            "stream": True,
            "return_logprob": True,
            "return_routed_experts": self.settings.routed_experts,
        }
        threading.Thread(target=self._stream, args=(body, self._events), daemon=True).start()

    def _stream(self, body: dict[str, Any], events: queue.Queue[Any]) -> None:
        """Pass the events of one request, or the exception that ended them, to the thread that serves."""
        try:
            for event in self._server.stream("/generate", body):
                events.put(event)
        except Exception as error:
            events.put(error)

    def _step(self, running: dict[str, Running]) -> Iterator[tuple[int, Completion]]:
        """Wait for the next event, but not for long."""
        try:
            event = self._events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            due = all(response.cut_off for response in running.values())  # the server should have sent them by now
            if self._server.answers() and not due:
                beat("decoding")
            return
        beat("decoding")
        if isinstance(event, Exception):
            running.clear()  # no event will tell of the other responses of this request
            with _memory_errors("decoding", self.settings):
                raise event
        name = event["meta_info"]["id"]
        if event["meta_info"]["finish_reason"]:
            yield self._ended(running.pop(name), event)
        else:
            running[name].begin()

    def _cut_off(self, names: list[str], running: dict[str, Running], why: str) -> Iterator[tuple[int, Completion]]:
        """The server reports what there is of an aborted response as the response's end."""
        for name in names:
            running[name].end(why)
        if why == "timeout":
            for name in names:
                self._server.post("/abort_request", {"rid": name})
            return
        while running:
            self._server.post("/abort_request", {"abort_all": True})  # repeated: a response may have been on its way
            yield from self._step(running)
            while running and not self._events.empty():
                yield from self._step(running)

    def _abandon(self, running: dict[str, Running]) -> None:
        if self._server.alive:
            for _ in self._cut_off(list(running), running, "interrupted"):
                pass

    def _ended(self, response: Running, event: dict[str, Any]) -> tuple[int, Completion]:
        info, tokens = event["meta_info"], event["output_ids"]
        scored = info.get("output_token_logprobs", [])
        if [token for _, token, *_ in scored] != tokens:
            raise RuntimeError(f"SGLang gave {len(tokens)} tokens, but {len(scored)} log-probs of other tokens")
        versions = {span["version"] for span in info.get("weight_versions", [])}
        if tokens and versions != {str(self.version)}:
            raise RuntimeError(f"SGLang sampled with the weights {sorted(versions)}, not with {self.version}")
        reason = _finish_reason(info["finish_reason"], response)
        if reason == "length" and len(tokens) < response.limit:
            fraction = self.settings.memory_fraction or "not set"
            raise UserError(
                f"SGLang ended a response after {len(tokens)} of {response.limit} tokens, because its KV cache is "
                f"full: raise [rollout] memory_fraction ({fraction}) or lower max_response_tokens"
            )
        logprobs = np.array([logprob for logprob, *_ in scored], np.float32)
        experts = self._routed_experts(info, len(response.tokens) + len(tokens) - 1, reason)
        return self._completion(response, np.array(tokens, np.int32), logprobs, reason, experts)

    def _routed_experts(self, info: dict[str, Any], length: int, reason: str) -> np.ndarray | None:
        """Of all tokens but the last, which no forward pass has seen."""
        if not self.settings.routed_experts:
            return None
        cut_off = reason in ("timeout", "interrupted")
        found = None
        if "routed_experts" in info:
            rows = -1, self._hf["num_hidden_layers"], self._hf["num_experts_per_tok"]
            found = np.frombuffer(base64.b64decode(info["routed_experts"]), np.int32).reshape(rows)
        return checked_experts(found, length, self._hf, cut_off)

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """One forward pass for each sequence."""
        body = {
            "input_ids": sequences,
            "sampling_params": {"max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scores = [answer["meta_info"]["input_token_logprobs"][1:] for answer in self._server.post("/generate", body)]
        return [np.array([logprob for logprob, *_ in of_tokens], np.float32) for of_tokens in scores]


def _finish_reason(reason: dict[str, Any], response: Running) -> str:
    kind = reason["type"]
    if kind == "abort" and response.cut_off:
        return response.cut_off
    if kind == "length" or (kind == "stop" and isinstance(reason["matched"], int)):
        return str(kind)
    raise RuntimeError(f"SGLang ended a response because of {reason}")  # for example logits that are not finite


def _parameters(sampling: Sampling, response: Running) -> dict[str, Any]:
    """Everything that shapes the distribution is set, because SGLang takes defaults from generation_config.json."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": response.limit,
        "sampling_seed": response.seed,  # a draw depends on it and the token's position: a continuation keeps it
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # it would ignore stop_token_ids, too
    }


def server_arguments(policy_dir: Path, version: int, settings: SglangSettings) -> list[str]:
    """The arguments of ``sglang.launch_server``."""
    context = settings.context + SPARE_POSITIONS
    values = {
        "model-path": policy_dir,
        "weight-version": version,
        "dtype": "float32" if settings.device == "cpu" else "bfloat16",
        "device": settings.device,
        "context-length": context,
        "max-running-requests": settings.responses,
        "tensor-parallel-size": settings.tensor_parallel,
        # without seeds of their own the responses of two replicas must not be drawn from the same random numbers
        "random-seed": response_seed(0, version, int(os.environ.get("RANK", "0"))) % 2**31,
        "stream-interval": WHOLE_RESPONSE,
        "grammar-backend": "none",
        "log-level": "warning",
    }
    flags = ["skip-tokenizer-init", "skip-server-warmup"]
    if settings.float32_head:
        flags.append("enable-fp32-lm-head")
    if settings.routed_experts:
        flags.append("enable-return-routed-experts")
    if settings.device == "cpu":
        values |= {"attention-backend": "torch_native", "sampling-backend": "pytorch"}
        values["max-total-tokens"] = context * settings.responses
        flags += ["disable-overlap-schedule", "enable-deterministic-inference"]  # the latter alone heeds seeds
    else:
        flags.append("enable-memory-saver")  # for `sleep`
    if settings.memory_fraction is not None:
        values["mem-fraction-static"] = settings.memory_fraction
    return as_arguments(values | dict.fromkeys(flags, True))


def _environment(settings: SglangSettings) -> dict[str, str]:
    if settings.device == "cpu":
        return ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
    return ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": replica_gpus(settings.tensor_parallel)}


@contextmanager
def _memory_errors(doing: str, settings: Settings) -> Iterator[None]:
    """The server's many lines about memory, as one `UserError` that says what a person can change."""
    try:
        yield
    except ServerFailed as error:
        cause = next((line for line in str(error).splitlines() if _SHORT_OF_MEMORY.search(line)), None)
        if cause is None:
            raise
        share = "the share for weights and KV cache"
        remedy = "raise memory_fraction where weights and cache do not fit into it"
        raise out_of_memory("SGLang", doing, cause.strip(), settings, share, remedy) from error
