"""The training side: the only package that imports megatron.core."""

import importlib
import logging
import sys
from collections.abc import Callable

import torch


def _lacks(advice: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: advice not in record.getMessage()


# what Megatron 0.19 and torch log on every start, and a person who trains can do nothing about
for _logger, _advice in {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}.items():
    logging.getLogger(_logger).addFilter(_lacks(_advice))

# Megatron imports flashinfer for its own inference. flashinfer asks CUDA for the capability of every GPU when it is
# imported: too early, since processes choose their GPUs and torch's allocator later, and the fork server must fork.
_hidden = "flashinfer" not in sys.modules
if _hidden:
    sys.modules["flashinfer"] = None  # type: ignore[assignment]  # its import fails
try:
    jit = importlib.import_module("megatron.core.jit")
    if not torch.cuda.is_available():
        jit.disable_jit_fuser()  # first: Megatron's modules decide when they are imported whether to use torch.compile
    for _module in ("inference.contexts.dynamic_context", "models.gpt"):
        importlib.import_module(f"megatron.core.{_module}")
finally:
    if _hidden:
        del sys.modules["flashinfer"]  # an engine may import it
