"""vLLM in this process, CPU build or CUDA: every response is a request of its own, all of them decode together.

What stands in a batch with a response changes the last bits of its log-probs and so, now and then, its tokens: the same
seeds do not promise the same bytes.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megarl.errors import UserError
from megarl.rollout import TEMPERATURES
from megarl.rollout.engine import Completion, Request, Sampling, check_request, continuation_seed, never

# No process beside this one, no socket beyond loopback, no look at the network, no log line a request.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # a replica lives on one node
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas on one machine would bind to the same cores
    "VLLM_CPU_CI_ENV": "1",  # no warm-up: it serves compiled graphs, of which a CPU has none here
    "HF_HUB_OFFLINE": "1",
}
CPU_STEP = 4096  # tokens that are computed together, or more where one response needs more
CPU_BLOCK = 32  # tokens; its attention kernel wants a multiple of this


@dataclass(frozen=True)
class Settings:
    """What a replica may take, in tokens, responses and GPUs."""

    device: str  # "cpu" | "cuda"
    context: int  # tokens of the longest prompt with its response
    responses: int  # decoded together
    memory_fraction: float = 0.92  # of a GPU
    tensor_parallel: int = 1  # GPUs


@dataclass
class _Running:
    """A response that the engine is working on."""

    request: int
    prompt: int
    sample: int
    deadline: float  # monotonic seconds; it was submitted when there was room, so it began at once


class VllmEngine:
    """A `RolloutEngine` on vLLM's `LLMEngine`.

    ``policy_dir`` is a local directory with config.json and safetensors. Weights are computed with in float32 on a CPU
    and in bfloat16 on a GPU. Too little memory is a `UserError` that names the settings.
    """

    repeats_chunks = False

    def __init__(self, policy_dir: Path, version: int, settings: Settings) -> None:
        self.settings, self.policy_dir, self.version = settings, Path(policy_dir), version
        self.precision = "float32" if settings.device == "cpu" else "bfloat16"
        self._engine: Any = None
        _prepare_process(settings)
        self.wake()

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """With a fresh engine, except for dense models on a CPU, where vLLM's reload is known to be right."""
        reloads = self._engine is not None and self.settings.device == "cpu" and not self._has_experts
        self.policy_dir, self.version = Path(policy_dir), version
        if reloads:
            self._reload()
        else:
            self.sleep()
            self.wake()

    def _reload(self) -> None:
        """In place. Wrong for experts on a CPU: vLLM repacks their weights when it loads, but not when it reloads."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(self.policy_dir)})
        self._engine.reset_prefix_cache()

    def sleep(self) -> None:
        """End the engine, which frees weights and cache; `wake` makes another."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
            gc.collect()

    def wake(self) -> None:
        if self._engine is None:
            self._engine = _start(self.policy_dir, self.settings)

    def close(self) -> None:
        self.sleep()

    @property
    def _has_experts(self) -> bool:
        return bool(self._engine.model_config.get_num_experts())

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
        try:
            while more or running:
                while more and len(running) < self.settings.responses and not interrupted():
                    if (following := next(numbered, None)) is None:
                        more = False
                    else:
                        running |= self._submit(*following)
                if interrupted():
                    yield from self._cut_off(list(running), running, "interrupted")
                    return
                if running:
                    yield from self._step(running)
        finally:
            if running and self._engine is not None:  # the caller left
                self._engine.abort_request(list(running))

    def _check(self, request: Request) -> None:
        if self._engine is None:
            raise RuntimeError("the engine sleeps: call wake() before generate()")
        vocabulary = self._engine.model_config.get_vocab_size()
        check_request(request.prompts, request.sampling, vocabulary, self._engine.model_config.max_model_len)
        low, high = TEMPERATURES["vllm"]
        if not low <= request.sampling.temperature <= high:
            raise UserError(f"temperature {request.sampling.temperature}: vLLM samples at {low} to {high}")

    def _submit(self, number: int, request: Request) -> dict[str, _Running]:
        self._check(request)
        sampling, submitted = request.sampling, {}
        for index, seed in enumerate(sampling.seeds):
            prompt, sample = divmod(index, sampling.samples)
            prefix = sampling.prefixes[index] if sampling.prefixes else ()
            name = f"{number}/{index}"
            tokens = [*request.prompts[prompt], *prefix]
            self._add(name, tokens, _parameters(sampling, seed, len(prefix)))
            submitted[name] = _Running(number, prompt, sample, time.monotonic() + sampling.timeout)
        return submitted

    def _add(self, name: str, tokens: list[int], parameters: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)

    def _step(self, running: dict[str, _Running]) -> Iterator[tuple[int, Completion]]:
        """One token for each response in the batch."""
        with _memory_errors("decoding", self.settings):
            outputs = self._engine.step()
        for output in outputs:  # of what has ended
            response, result = running.pop(output.request_id), output.outputs[0]
            tokens, logprobs = _tokens_and_logprobs(result.token_ids, result.logprobs)
            yield response.request, self._completion(response, tokens, logprobs, result.finish_reason)
        now = time.monotonic()
        late = [name for name, response in running.items() if now > response.deadline]
        yield from self._cut_off(late, running, "timeout")

    def _cut_off(self, names: list[str], running: dict[str, _Running], why: str) -> Iterator[tuple[int, Completion]]:
        """End responses before their time and hand out what there is of them."""
        if not names:
            return
        states = {state.external_req_id: state for state in self._engine.output_processor.request_states.values()}
        partial = {}
        for name in names:
            tokens, logprobs = states[name].detokenizer.output_token_ids, states[name].logprobs_processor.logprobs
            if tokens or why == "interrupted":  # what is late is worth its first token still
                partial[name] = _tokens_and_logprobs(tokens, logprobs)
        self._engine.abort_request(list(partial))
        for name, found in partial.items():
            response = running.pop(name)
            yield response.request, self._completion(response, *found, why)

    def _completion(self, response: _Running, tokens: np.ndarray, logprobs: np.ndarray, why: str) -> Completion:
        return Completion(
            prompt=response.prompt,
            sample=response.sample,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=why,
            routed_experts=None,
            policy_version=self.version,
        )

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of all but the first token of each sequence, [n - 1] float32, in one pass each."""
        from vllm import SamplingParams

        for index, tokens in enumerate(sequences):
            parameters = SamplingParams(
                temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True
            )
            self._add(f"score/{index}", tokens, parameters)
        found = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id] = output.prompt_logprobs
        return [_of_prompt(found[f"score/{index}"], tokens) for index, tokens in enumerate(sequences)]


def _of_prompt(scores: Any, tokens: list[int]) -> np.ndarray:
    """Position by position the log-prob of the token that stands there; the first has none."""
    values = [scores[position][token].logprob for position, token in enumerate(tokens) if position]
    return np.array(values, np.float32)


def _parameters(sampling: Sampling, seed: int, done: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        seed=continuation_seed(seed, done),
        max_tokens=sampling.max_tokens - done,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # what stops a response stands in stop_token_ids, all of it
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _tokens_and_logprobs(tokens: Any, logprobs: Any) -> tuple[np.ndarray, np.ndarray]:
    """[n] int32, [n] float32; the sampled token stands first at each position of the flat log-probs."""
    first = np.array(logprobs.start_indices, np.int64)
    return np.array(tokens, np.int32), np.array(logprobs.logprobs, np.float32)[first]


def _prepare_process(settings: Settings) -> None:
    """The environment is read when vLLM is imported and when an engine starts."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_own_gpus(settings.tensor_parallel))


def _own_gpus(count: int) -> list[str]:
    """Those of this replica, by its place on the node: vLLM takes the first that are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    first = int(os.environ.get("LOCAL_RANK", "0")) * count
    return every[first : first + count]


def _start(policy_dir: Path, settings: Settings) -> Any:
    if not (policy_dir / "config.json").is_file():
        raise UserError(f"{policy_dir} is no Hugging Face model directory: it has no config.json")
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    set_num_threads = torch.set_num_threads
    with _memory_errors("starting", settings):
        arguments = EngineArgs(**engine_arguments(policy_dir, settings))
        engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
    torch.set_num_threads = set_num_threads  # which its CPU worker replaces by nothing
    return engine


def engine_arguments(policy_dir: Path, settings: Settings) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`."""
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "skip_tokenizer_init": True,
        "dtype": "float32" if settings.device == "cpu" else "bfloat16",
        "seed": 0,
        "max_model_len": settings.context,
        "max_num_seqs": settings.responses,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the policy's own would change what is sampled
        "tensor_parallel_size": settings.tensor_parallel,
        "disable_log_stats": True,
    }
    if settings.device == "cpu":
        cache = {"block_size": CPU_BLOCK, "kv_cache_memory_bytes": _cache_bytes(policy_dir, settings)}
        # After a part of a prompt vLLM sets a response's random numbers back, which those of a CPU cannot do.
        whole_prompts = {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_STEP, settings.context, settings.responses),
        }
        return arguments | {"enforce_eager": True, **cache, **whole_prompts}
    return arguments | {"gpu_memory_utilization": settings.memory_fraction}


def _cache_bytes(policy_dir: Path, settings: Settings) -> int:
    """KV cache on a CPU: for all responses at full length, or what there is of memory."""
    hf = json.loads((policy_dir / "config.json").read_text())
    heads = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    blocks = -(-settings.context // CPU_BLOCK) * settings.responses + 1  # one stands for padding
    wanted = 2 * 4 * hf["num_hidden_layers"] * heads * width * CPU_BLOCK * blocks
    return min(wanted, int(settings.memory_fraction * psutil.virtual_memory().available))


@contextmanager
def _memory_errors(doing: str, settings: Settings) -> Iterator[None]:
    """What a person can change when memory is short, in place of vLLM's own many messages."""
    try:
        yield
    except (ValueError, RuntimeError, MemoryError) as error:  # torch's are RuntimeErrors
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise UserError(
            f"vLLM ran out of memory while {doing}: {str(error).splitlines()[0] if str(error) else 'MemoryError'}. "
            f"[rollout] memory_fraction = {settings.memory_fraction} is the share that an engine may take; "
            f"groups_per_chunk * responses_per_prompt = {settings.responses} responses decode together, each of up to "
            f"data.max_prompt_tokens + max_response_tokens = {settings.context} tokens: lower one of these, or "
            "memory_fraction where something else holds memory"
        ) from error
