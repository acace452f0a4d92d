"""Lets unmodified Megatron-Core run on the CPU (gloo, float32).

Megatron-Core asks for ``torch.cuda`` and ``device="cuda"``. `install` rebinds the *name* ``torch`` inside loaded
``megatron.core`` modules to a proxy that answers with the CPU; the real ``torch`` is never modified. A few functions of
Megatron-Core 0.16.1 that ask a tensor whether it is on a GPU, or move it there, are patched in addition. Patches that
do not depend on the device are elsewhere (`megarl.actor.model`), for every backend.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "tensor", "zeros")  # which Megatron calls for device "cuda" on the ways that megarl takes
# Megatron imports these lazily; they must be loaded before the name `torch` in them can be rebound.
_LAZY_MODULES = (
    "models.gpt", "optimizer", "optimizer.distrib_optimizer", "distributed", "pipeline_parallel",
    "tensor_parallel.random", "transformer.moe.moe_utils",
    "dist_checkpointing.strategies.torch", "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver", "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async", "dist_checkpointing.exchange_utils",
)  # fmt: skip


_installed: torch.device | None = None


def install(device: torch.device = _CPU) -> None:
    """Make every loaded ``megatron.core`` module see ``device`` as the GPU; call it before a model is built.

    A second call with the same device does nothing; a process has one device. On the meta device a model has shapes but
    no memory, which `megarl.actor.parameter_counts` needs to count parameters.
    """
    global _installed
    if _installed is not None:
        assert _installed == device
        return
    _installed = device
    from megatron.core import jit

    jit.disable_jit_fuser()  # before the imports below, at which fused functions choose torch.compile
    for name in _LAZY_MODULES:
        importlib.import_module(f"megatron.core.{name}")
    _undo_compilation()
    proxy = _TorchOnCpu(device)
    for module in _megatron_modules():
        if getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = proxy
    _patch_random_state()
    _patch_yarn()
    _patch_tied_embeddings()
    _patch_optimizer()


def _megatron_modules() -> list[types.ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.startswith("megatron.core") and m is not None]


def _undo_compilation() -> None:
    """Undo torch.compile of the fused functions in modules that were imported before, as in forks of a server."""
    for module in _megatron_modules():
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in (module, *(one for one in classes if one.__module__ == module.__name__)):
            for name, value in list(vars(owner).items()):
                if isinstance(value, types.FunctionType) and value.__module__.startswith("megatron.core."):
                    setattr(owner, name, vars(value).get("_torchdynamo_orig_callable", value))


class _NullStream(torch.cpu.Stream, torch.cpu.Event):
    """Replaces torch.cuda.Stream and Event: work on the CPU is in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> _NullStream:  # type: ignore[override]
        return self


class _CudaOnCpu(types.ModuleType):
    def __init__(self, device: torch.device) -> None:
        super().__init__("torch.cuda")
        stream = _NullStream()
        self.Stream = self.Event = _NullStream
        self.current_device = lambda: device
        self.current_stream = self.default_stream = lambda *_, **__: stream
        self.stream = lambda *_, **__: contextlib.nullcontext()
        self.synchronize = self.empty_cache = self.set_device = lambda *_, **__: None
        self.is_available = self.is_current_stream_capturing = lambda: False
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu(types.ModuleType):
    def __init__(self, device: torch.device) -> None:
        super().__init__("torch")
        self.cuda = _CudaOnCpu(device)
        for name in _FACTORIES:
            setattr(self, name, _factory_on(device, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _factory_on(target: torch.device, factory: Any) -> Any:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = target
        return factory(*args, **kwargs)

    return create


def _patch_random_state() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_yarn() -> None:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    # the constructor computes tables, which nobody reads, and divides them with a call of Tensor.cuda()
    yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda tables, *_, **__: tables


def _patch_tied_embeddings() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    # between pipeline stages the original calls Tensor.cuda()
    setup = LanguageModule.setup_embeddings_and_output_layer
    LanguageModule.setup_embeddings_and_output_layer = _with_cuda_type_names(setup)


def _patch_optimizer() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    build = DistributedOptimizer._build_model_and_main_param_groups.__func__
    DistributedOptimizer._build_model_and_main_param_groups = classmethod(_with_cuda_type_names(build))


class _CudaTypeNames(torch.overrides.TorchFunctionMode):
    """``tensor.type()`` answers 'torch.cuda.FloatTensor': Megatron's optimizer compares these strings."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and len(args) == 1 and isinstance(out, str):
            out = out.replace("meta.", "").replace("torch.", "torch.cuda.", 1)
        return out


def _with_cuda_type_names(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _CudaTypeNames():
            return function(*args, **kwargs)

    return wrapped
