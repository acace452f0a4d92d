"""SGLang as a server process beside this one: every response is a request of its own, all of them decode together.

What stands in a batch with a response changes the last bits of its log-probs and so, now and then, its tokens: the same
seeds do not promise the same bytes.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.rollout.engine import Completion, Request, Sampling, check_request, expert_type, never
from megarl.rollout.sglang.server import Server, ServerFailed

POLL_SECONDS = 0.1  # between two looks at `interrupted` and at deadlines while no response ends
WHOLE_RESPONSE = 1 << 30  # tokens between two events of a response: there are its first token and its end
# positions that SGLang wants beyond a response at full length; without them it ends the response earlier, unasked
SPARE_POSITIONS = 8
_SHORT_OF_MEMORY = re.compile("out of memory|not enough memory|memory pool size is too small", re.IGNORECASE)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # a replica lives on one node
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare positions, which no request ever reaches
}


@dataclass(frozen=True)
class Settings:
    """What a replica may take, in tokens, responses and GPUs."""

    device: str  # "cpu" | "cuda"
    context: int  # tokens of the longest prompt with its response
    responses: int  # decoded together
    memory_fraction: float = 0.85  # of a GPU, for weights and KV cache
    tensor_parallel: int = 1  # GPUs
    python: Path = Path(sys.executable)  # interpreter that has SGLang
    routed_experts: bool = False  # record them; a model with experts only


@dataclass
class _Running:
    """A response that the engine is working on."""

    request: int
    prompt: int
    sample: int
    tokens: int  # that it was asked to continue
    limit: int  # tokens that it may add
    timeout: float  # seconds
    deadline: float | None = None  # monotonic seconds, from its first token on
    cut_off: str | None = None  # finish reason once it is to end before its time


class SglangEngine:
    """A `RolloutEngine` on an SGLang server.

    ``policy_dir`` is a local directory with config.json and safetensors. Weights are computed with in float32 on a CPU
    and in bfloat16 on a GPU. A server that dies is a `ServerFailed` with the end of its log, one that lacks memory a
    `UserError` that names the settings.
    """

    repeats_chunks = False

    def __init__(self, policy_dir: Path, version: int, settings: Settings) -> None:
        self.settings, self.policy_dir, self.version = settings, Path(policy_dir), version
        self.precision = "float32" if settings.device == "cpu" else "bfloat16"
        self._asleep = False
        # never used twice: SGLang aborts a name once more, two seconds after the client has its answer
        self._names = (f"{number}/" for number in itertools.count())  # none begins another: aborts go by beginnings
        self._hf, self._own_stops = read_hf_config(self.policy_dir), _end_of_sequence(self.policy_dir)
        arguments = server_arguments(self.policy_dir, version, settings)
        self._meeting = tempfile.TemporaryDirectory(prefix="megarl-")  # of the server's processes, in place of a port
        environment = _environment(settings) | {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._meeting.name}/store"
        }
        self._server = Server(settings.python, arguments, environment)
        try:
            with _memory_errors("starting", settings):
                self._server.wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """In place, for a model of the same architecture; also drops the cached prefixes of the weights before.

        A directory that SGLang cannot load is a `UserError`.
        """
        hf = read_hf_config(policy_dir)
        if self._asleep:
            self._server.post("/resume_memory_occupation", {})
            self._asleep = False
        body = {"model_path": str(policy_dir), "weight_version": str(version), "flush_cache": True}
        try:
            self._server.post("/update_weights_from_disk", body)
        except ServerFailed as error:
            if not self._server.alive:
                raise
            raise UserError(f"SGLang cannot load the policy in {policy_dir}: {error}") from error
        self._hf, self._own_stops = hf, _end_of_sequence(policy_dir)
        self.policy_dir, self.version = Path(policy_dir), version

    def sleep(self) -> None:
        """On a GPU the server keeps its processes and CUDA context alone; a CPU server answers and frees nothing."""
        if not self._asleep:
            self._server.post("/release_memory_occupation", {})
            self._asleep = True

    def wake(self) -> None:
        """The memory of released weights comes back empty, so they are read again."""
        if self._asleep:
            self.load_weights(self.policy_dir, self.version)

    def close(self) -> None:
        self._server.stop()
        self._meeting.cleanup()

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[Completion]:
        request = Request(prompts, sampling)
        self._check(request)
        return (completion for _, completion in self.serve(iter([request])))

    def serve(
        self, requests: Iterator[Request], interrupted: Callable[[], bool] = never
    ) -> Iterator[tuple[int, Completion]]:
        """The engine never waits for the end of a request: it takes the next one as soon as responses have ended."""
        numbered, more = enumerate(requests), True
        running: dict[str, _Running] = {}
        events: queue.Queue[Any] = queue.Queue()
        try:
            while more or running:
                while more and len(running) < self.settings.responses and not interrupted():
                    if (following := next(numbered, None)) is None:
                        more = False
                    else:
                        running |= self._submit(*following, events)
                if interrupted():
                    yield from self._cut_off_all(running, events)
                    return
                if running:
                    yield from self._receive(running, events)
        finally:
            if running and self._server.alive:  # the caller left
                for _ in self._cut_off_all(running, events):
                    pass

    def _check(self, request: Request) -> None:
        """SGLang's CPU build dies of a token outside the vocabulary, so nothing is sent unchecked."""
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() before generate()")
        check_request(request.prompts, request.sampling, self._hf["vocab_size"], self.settings.context)
        stops = set(request.sampling.stop_token_ids)
        if stops and (more := self._own_stops - stops):
            raise UserError(
                f"stop tokens {sorted(stops)} lack {sorted(more)} of {self.policy_dir}, at which SGLang ends a "
                "response anyway (eos_token_id of config.json or generation_config.json)"
            )

    def _submit(self, number: int, request: Request, events: queue.Queue[Any]) -> dict[str, _Running]:
        self._check(request)
        sampling, submitted = request.sampling, {}
        body: dict[str, list[Any]] = {"rid": [], "input_ids": [], "sampling_params": []}
        for index, seed in enumerate(sampling.seeds):
            prompt, sample = divmod(index, sampling.samples)
            prefix = sampling.prefixes[index] if sampling.prefixes else ()
            tokens = [*request.prompts[prompt], *prefix]
            name = next(self._names)
            body["rid"].append(name)
            body["input_ids"].append(tokens)
            body["sampling_params"].append(_parameters(sampling, seed, len(prefix)))
            limit = sampling.max_tokens - len(prefix)
            submitted[name] = _Running(number, prompt, sample, len(tokens), limit, sampling.timeout)
        threading.Thread(target=self._stream, args=(body, events), daemon=True).start()
        return submitted

    def _stream(self, body: dict[str, Any], events: queue.Queue[Any]) -> None:
        """The events of one request, or the exception that ended them, to the thread that serves."""
        options = {"stream": True, "return_logprob": True, "return_routed_experts": self.settings.routed_experts}
        try:
            for event in self._server.stream("/generate", body | options):
                events.put(event)
        except Exception as error:
            events.put(error)

    def _receive(self, running: dict[str, _Running], events: queue.Queue[Any]) -> Iterator[tuple[int, Completion]]:
        """What the next event says, if one comes before it is time to look elsewhere."""
        try:
            event = events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            event = None
        now = time.monotonic()
        if isinstance(event, Exception):
            running.clear()  # nothing more is said of what the server refused
            with _memory_errors("decoding", self.settings):
                raise event
        if event:
            name = event["meta_info"]["id"]
            response = running[name]
            if event["meta_info"]["finish_reason"]:
                del running[name]
                yield response.request, self._completion(response, event)
            else:
                response.deadline = now + response.timeout
        for name, response in running.items():
            if response.deadline is not None and now > response.deadline and not response.cut_off:
                response.cut_off = "timeout"
                self._server.post("/abort_request", {"rid": name})

    def _cut_off_all(self, running: dict[str, _Running], events: queue.Queue[Any]) -> Iterator[tuple[int, Completion]]:
        """End all responses and hand out what there is of them."""
        for response in running.values():
            response.cut_off = response.cut_off or "interrupted"
        while running:
            self._server.post("/abort_request", {"abort_all": True})  # again: one may have been on its way
            yield from self._receive(running, events)
            while running and not events.empty():
                yield from self._receive(running, events)

    def _completion(self, response: _Running, event: dict[str, Any]) -> Completion:
        info, tokens = event["meta_info"], event["output_ids"]
        scored = info.get("output_token_logprobs", [])
        if [token for _, token, *_ in scored] != tokens:
            raise RuntimeError(f"SGLang gave {len(tokens)} tokens and log-probs of others, {len(scored)}")
        versions = {span["version"] for span in info.get("weight_versions", [])}
        if tokens and versions != {str(self.version)}:
            raise RuntimeError(f"SGLang sampled with the weights {sorted(versions)}, not with {self.version}")
        reason = _finish_reason(info["finish_reason"], response)
        if reason == "length" and len(tokens) < response.limit:
            raise UserError(
                f"SGLang ended a response after {len(tokens)} of {response.limit} tokens, for its KV cache holds no "
                f"more: raise [rollout] memory_fraction = {self.settings.memory_fraction} or lower max_response_tokens"
            )
        return Completion(
            prompt=response.prompt,
            sample=response.sample,
            tokens=np.array(tokens, np.int32),
            logprobs=np.array([logprob for logprob, *_ in scored], np.float32),
            finish_reason=reason,
            routed_experts=self._routed_experts(info, response.tokens + len(tokens) - 1, reason),
            policy_version=self.version,
        )

    def _routed_experts(self, info: dict[str, Any], length: int, reason: str) -> np.ndarray | None:
        """[length, layers, top_k]: of all tokens but the last, which no forward pass has seen."""
        if not self.settings.routed_experts:
            return None
        shape = length, self._hf["num_hidden_layers"], self._hf["num_experts_per_tok"]
        experts = self._hf["num_experts"]
        if "routed_experts" not in info:
            if reason not in ("timeout", "interrupted"):  # one that was cut off may have been waiting its turn
                raise RuntimeError(f"SGLang recorded no experts of a response that ended by {reason}")
            return np.full(shape, -1, expert_type(experts))
        found = np.frombuffer(base64.b64decode(info["routed_experts"]), np.int32).reshape(shape)
        if found.size and not 0 <= found.min() <= found.max() < experts:
            raise RuntimeError(f"SGLang recorded experts {found.min()} to {found.max()}; the model has {experts}")
        return found.astype(expert_type(experts))

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of all but the first token of each sequence, [n - 1] float32, in one pass each."""
        body = {
            "input_ids": sequences,
            "sampling_params": {"max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scores = [answer["meta_info"]["input_token_logprobs"][1:] for answer in self._server.post("/generate", body)]
        return [np.array([logprob for logprob, *_ in of_tokens], np.float32) for of_tokens in scores]


def _finish_reason(reason: dict[str, Any], response: _Running) -> str:
    kind = reason["type"]
    if kind == "abort" and response.cut_off:
        return response.cut_off
    if kind == "length" or (kind == "stop" and isinstance(reason["matched"], int)):
        return str(kind)
    raise RuntimeError(f"SGLang ended a response because of {reason}")  # logits that are not finite, for one


def _parameters(sampling: Sampling, seed: int, done: int) -> dict[str, Any]:
    """All that shapes the distribution is said, for the policy's generation_config.json has opinions of its own."""
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": sampling.max_tokens - done,
        "sampling_seed": seed >> 1,  # of 63 bits; with the position it makes each draw, so a continuation keeps it
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # it would switch stop_token_ids off, too
    }


def _end_of_sequence(policy_dir: Path) -> set[int]:
    """Tokens at which the server ends a response by itself."""
    own: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(policy_dir) / name
        tokens = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        own.update(tokens if isinstance(tokens, list) else [] if tokens is None else [tokens])
    return own


def server_arguments(policy_dir: Path, version: int, settings: Settings) -> list[str]:
    """Of ``sglang.launch_server``."""
    context = settings.context + SPARE_POSITIONS
    values = {
        "model-path": policy_dir,
        "weight-version": version,
        "dtype": "float32" if settings.device == "cpu" else "bfloat16",
        "device": settings.device,
        "context-length": context,
        "max-running-requests": settings.responses,
        "mem-fraction-static": settings.memory_fraction,
        "tensor-parallel-size": settings.tensor_parallel,
        "random-seed": 0,
        "stream-interval": WHOLE_RESPONSE,
        "sampling-defaults": "openai",
        "grammar-backend": "none",
        "log-level": "warning",
    }
    flags = ["skip-tokenizer-init", "skip-server-warmup", "enable-deterministic-inference"]  # which heeds seeds
    if settings.routed_experts:
        flags.append("enable-return-routed-experts")
    if settings.device == "cpu":
        values |= {"attention-backend": "torch_native", "sampling-backend": "pytorch"}
        values["max-total-tokens"] = context * settings.responses
        flags.append("disable-overlap-schedule")
    else:
        flags.append("enable-memory-saver")  # for `sleep`
    return [part for name, value in values.items() for part in (f"--{name}", str(value))] + [f"--{f}" for f in flags]


def _environment(settings: Settings) -> dict[str, str]:
    if settings.device == "cpu":
        return ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
    count = settings.tensor_parallel
    first = int(os.environ.get("LOCAL_RANK", "0")) * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[first : first + count] if visible else map(str, range(first, first + count))
    return ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(own)}


@contextmanager
def _memory_errors(doing: str, settings: Settings) -> Iterator[None]:
    """What a person can change when memory was short, in place of the server's many lines."""
    try:
        yield
    except ServerFailed as error:
        cause = next((line for line in str(error).splitlines() if _SHORT_OF_MEMORY.search(line)), None)
        if cause is None:
            raise
        raise UserError(
            f"SGLang ran out of memory while {doing}: {cause.strip()}. [rollout] memory_fraction = "
            f"{settings.memory_fraction} is the share for weights and KV cache; groups_per_chunk * "
            f"responses_per_prompt = {settings.responses} responses decode together, each of up to "
            f"data.max_prompt_tokens + max_response_tokens = {settings.context} tokens: lower one of these, or raise "
            "memory_fraction where weights and cache do not fit into it"
        ) from error
