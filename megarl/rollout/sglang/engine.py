"""The rollout engine on an SGLang server, which is a child of this process."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import queue
import secrets
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.models.hf_config import read_hf_config
from megarl.recipe.tables import Recipe
from megarl.rollout.continuous import ContinuousEngine, Running, Settings, check_table, memory_errors
from megarl.rollout.engine import (
    Completion,
    EngineFault,
    RolloutEngine,
    Sampling,
    replica_gpus,
    section,
)
from megarl.rollout.options import as_arguments, check_options
from megarl.rollout.sglang.server import OWN, Server, ServerFailed, installed_version, server_environment

RECORDS_EXPERTS = frozenset({"cpu", "cuda"})
NEW_INTERPRETER = True
TEMPERATURES = (1e-6, float("inf"))  # below the minimum SGLang decodes greedily
POLL_SECONDS = 0.1  # longest wait for an event before `interrupted` and the timeouts are checked again
IDLE_SECONDS = 60  # how long a server that has sent all responses may take to release them
WHOLE_RESPONSE = 1 << 30  # tokens between two events of a response: only its first token and its end are reported
# extra positions of the context, without which SGLang ends a response shortly before its full length
SPARE_POSITIONS = 8
_PARSER = """
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # a replica never spans nodes
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for `SPARE_POSITIONS`, which no request ever reaches
}


_memory_errors = functools.partial(
    memory_errors,
    kinds=(ServerFailed,),
    engine="SGLang",
    share="the share of memory for weights and KV cache",
    remedy="raise memory_fraction if weights and cache do not fit into it",
)


def check(recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
    """Raise `UserError` if the interpreter for SGLang lacks it, or if SGLang cannot serve the recipe's temperatures,
    GPUs or options."""
    settings = Settings.of(recipe, stage)
    python = settings.python
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
    own = server_arguments(recipe.model.path, 0, settings) + as_arguments(dict.fromkeys(OWN, 0))
    check_options("sglang", settings.options, own, python, _PARSER, server_environment(python, {}))


def build(recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool) -> RolloutEngine:
    """See `EngineModule`."""
    return SglangEngine(policy_dir, version, Settings.of(recipe, stage, routed_experts))


class SglangEngine(ContinuousEngine):
    """A `RolloutEngine` on an SGLang server.

    ``policy_dir`` is a local directory with config.json and safetensors. If the server dies, `ServerFailed` shows the
    end of its log; if it runs out of memory, `UserError` names the settings to change.
    """

    def __init__(self, policy_dir: Path, version: int, settings: Settings) -> None:
        super().__init__(policy_dir, version, settings)
        self._asleep = False
        self._events: queue.Queue[Any] = queue.Queue()  # of the responses that run
        self._hf = read_hf_config(self.policy_dir)
        arguments = server_arguments(self.policy_dir, version, settings) + as_arguments(settings.options)
        # holds the key and the store of the server's ranks
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-")
        environment = _environment(settings) | {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._folder.name}/store"
        }
        self._server = Server(settings.python, arguments, environment, Path(self._folder.name))
        try:
            with _memory_errors("starting", settings):
                self._server.wait_until_healthy()
            self.cache_tokens = self._server.get("/server_info")["max_total_num_tokens"]
        except BaseException:
            self.close()
            raise

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """Loads in place, so the model must have the same architecture, and drops the prefix cache of the old weights.

        Raises `EngineFault` if SGLang cannot load it.
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
            raise EngineFault(f"SGLang cannot load the policy in {policy_dir}: {error}") from error
        self._hf, self.policy_dir, self.version = hf, Path(policy_dir), version

    def checksum(self) -> str | None:
        ranks = self._server.post("/weights_checker", {"action": "checksum"})["ranks"]
        return hashlib.sha256(json.dumps([rank["checksums"] for rank in ranks], sort_keys=True).encode()).hexdigest()

    def sleep(self) -> None:
        """On a GPU only the server's processes and its CUDA context keep memory; on a CPU nothing is freed."""
        if not self._asleep:
            self._wait_until_idle()
            self._server.post("/release_memory_occupation", {})
            self._asleep = True

    def _wait_until_idle(self) -> None:
        """Wait until the server holds no response: a busy server neither loads weights nor frees memory.

        It may still hold a response for a moment after it has sent the whole of it.
        """
        self._server.post(f"/flush_cache?timeout={IDLE_SECONDS}", {})

    def close(self) -> None:
        self._server.stop()
        self._folder.cleanup()

    def _send(self, responses: dict[str, Running], sampling: Sampling) -> None:
        """A response begins when the event of its first token arrives."""
        if not self._running:
            self._events = queue.Queue()  # threads of earlier requests may still put events into the old one
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
        """In a thread of its own: put the events of one request into ``events``, or its names and what ended them."""
        try:
            for event in self._server.stream("/generate", body):
                events.put(event)
        except Exception as error:
            events.put((body["rid"], error))

    def _step(self) -> list[tuple[int, Completion]]:
        """Handle the next event, or return after `POLL_SECONDS` without one."""
        try:
            event = self._events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            # all aborted: the server must send them
            overdue = all(response.cut_off for response in self._running.values())
            if self._server.answers() and not overdue:  # without a heartbeat a server that stands still is noticed
                beat("decoding")
            return []
        beat("decoding")
        if isinstance(event, tuple):
            names, error = event
            for name in names:
                self._running.pop(name, None)  # no further events will arrive for the responses of this request
            with _memory_errors("decoding", self.settings):
                raise error
        name = event["meta_info"]["id"]
        if event["meta_info"]["finish_reason"]:
            return [self._ended(self._running.pop(name), event)]
        self._running[name].begin()
        return []

    def _cut_off(self, names: list[str], why: str) -> list[tuple[int, Completion]]:
        """Aborts the responses; the server then reports what it has of each as the response's last event."""
        for name in names:
            self._running[name].end(why)
        if why == "timeout":
            for name in names:
                self._server.post("/abort_request", {"rid": name})
            return []
        ended = []
        while self._running:
            # repeated, because a submitted response may not have reached the server at the last call
            self._server.post("/abort_request", {"abort_all": True})
            ended += self._step()
            while self._running and not self._events.empty():
                ended += self._step()
        return ended

    def _abort(self) -> None:
        if self._server.alive:
            self.interrupt()

    def _ended(self, response: Running, event: dict[str, Any]) -> tuple[int, Completion]:
        """The completion of a response from its last event, which is checked for consistency."""
        info, tokens = event["meta_info"], event["output_ids"]
        scored = info.get("output_token_logprobs", [])
        wrong = None
        if [token for _, token, *_ in scored] != tokens:
            wrong = f"SGLang returned {len(tokens)} tokens with {len(scored)} log-probs, which belong to other tokens"
        versions = {span["version"] for span in info.get("weight_versions", [])}
        if tokens and versions != {str(self.version)}:
            raise RuntimeError(
                f"SGLang sampled a response with weights of version {', '.join(sorted(versions)) or 'unknown'} instead "
                f"of {self.version}"
            )
        reason = _finish_reason(info["finish_reason"], response)
        if reason == "length" and len(tokens) < response.limit:
            fraction = self.settings.memory_fraction or "not set"
            raise EngineFault(
                f"SGLang ended a response after {len(tokens)} of {response.limit} tokens, because its KV cache is "
                f"full: raise [rollout] memory_fraction ({fraction}) or lower max_response_tokens"
            )
        logprobs = np.array([logprob for logprob, *_ in scored], np.float32)
        record = None
        if "routed_experts" in info:
            rows = -1, self._hf["num_hidden_layers"], self._hf["num_experts_per_tok"]
            try:
                record = np.frombuffer(base64.b64decode(info["routed_experts"]), np.int32).reshape(rows)
            except ValueError as error:
                wrong = wrong or f"SGLang's record of routed experts cannot be read: {error}"
        return self._completion(response, np.array(tokens, np.int64), logprobs, reason, record, wrong)

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Sends the sequences as prompts and takes their input log-probs: one forward pass for each."""
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
    return str(reason)  # for example because logits are not finite; `fault` tells of it


def _parameters(sampling: Sampling, response: Running) -> dict[str, Any]:
    """Sets everything that shapes the distribution, because SGLang takes defaults from generation_config.json."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": response.limit,
        # a draw depends on the seed and the token's position, so a continuation needs no seed of its own
        "sampling_seed": response.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # true makes SGLang ignore stop_token_ids, too
    }


def server_arguments(policy_dir: Path, version: int, settings: Settings) -> list[str]:
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
        # where SGLang ignores the responses' seeds, two replicas or starts must not draw the same random numbers
        "random-seed": secrets.randbelow(2**31),
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
        # only the deterministic mode uses the responses' seeds
        flags += ["disable-overlap-schedule", "enable-deterministic-inference"]
    else:
        flags.append("enable-memory-saver")  # for `sleep`
    if settings.memory_fraction is not None:
        values["mem-fraction-static"] = settings.memory_fraction
    return as_arguments(values | dict.fromkeys(flags, True))


def _environment(settings: Settings) -> dict[str, str]:
    if settings.device == "cpu":
        return ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
    return ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": replica_gpus(settings.tensor_parallel)}
