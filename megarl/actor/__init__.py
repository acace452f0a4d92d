"""The training side: the only package that imports megatron.core."""

import importlib
import sys

import torch

# Megatron imports flashinfer for its own inference. flashinfer asks CUDA for the capability of every GPU when it is
# imported: too early, since processes choose their GPUs and torch's allocator later, and the fork server must fork.
_hidden = "flashinfer" not in sys.modules
if _hidden:
    sys.modules["flashinfer"] = None  # type: ignore[assignment]  # its import fails
try:
    jit = importlib.import_module("megatron.core.jit")
    if not torch.cuda.is_available():
        jit.disable_jit_fuser()  # first: Megatron's modules decide when they are imported whether to use torch.compile
    importlib.import_module("megatron.core.inference.contexts.dynamic_context")
finally:
    if _hidden:
        del sys.modules["flashinfer"]  # an engine may import it
