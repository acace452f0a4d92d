"""Counts kernel launches, and waits for the device by the place in Python that causes them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import megarl
from tests.rehearsal import triton_interpreter
from tests.rehearsal.device import lib

PACKAGE = str(Path(megarl.__file__).parent) + "/"
DEVICE = tuple(f"/tests/rehearsal/{name}.py" for name in ("counts", "cuda_only", "device", "triton_interpreter"))
SKIPPED = ("/site-packages/torch/", "<frozen", "<string>", "/contextlib.py", *DEVICE)
OTHERS = (" at megatron/", " at transformers/", " at autograd")
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


@dataclass
class Seen:
    """Places are ``path:line function`` of the innermost frame that is not torch's, or "autograd" without one."""

    waits: Counter[str] = field(default_factory=Counter)  # "what at place"
    launch_count: int = 0

    @property
    def own_waits(self) -> Counter[str]:
        return Counter({place: n for place, n in self.waits.items() if not any(x in place for x in OTHERS)})


@contextlib.contextmanager
def counted() -> Iterator[Seen]:
    seen = Seen()

    def listen(kind: bytes, name: bytes) -> None:
        if kind == b"wait":
            seen.waits[f"{name.decode()} at {place()}"] += 1

    listener, before = LISTENER(listen), lib.launch_count()
    lib.set_listener(ctypes.cast(listener, ctypes.c_void_p).value)
    try:
        yield seen
    finally:
        lib.set_listener(0)
        seen.launch_count = lib.launch_count() - before


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, products of matrices and attention left out.

    Of a source of rows only those count that are taken. Triton's kernels read or write each argument once.
    """

    PRODUCTS = ("mm", "bmm", "addmm", "_grouped_mm", "_flash_attention_forward", "_flash_attention_backward")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        tensors = [x for x in pytree.tree_leaves((args, kwargs, out)) if torch.is_tensor(x)]
        if view or name in self.PRODUCTS or "empty" in name or not any(x.is_cuda for x in tensors):
            return out
        if name in ("index_select", "gather", "_embedding_bag_forward_only"):
            taken = out if isinstance(out, torch.Tensor) else out[0]
            rows = args[1].numel() if name == "_embedding_bag_forward_only" else args[-1].numel()
            row_bytes = taken.nbytes // max(1, taken.shape[0])
            self.add(name, (rows if name != "gather" else taken.shape[0]) * row_bytes + taken.nbytes)
        elif name in ("fill_", "zero_"):
            self.add(name, args[0].nbytes)
        elif name == "copy_":
            self.add(name, args[0].nbytes + args[1].nbytes)
        else:
            self.add(name, sum(x.nbytes for x in tensors))
        return out

    def add(self, name: str, size: int) -> None:
        self.bytes += size

    def __enter__(self) -> Moved:
        triton_interpreter.launches_seen.append(self.add)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        triton_interpreter.launches_seen.remove(self.add)
        super().__exit__(*error)


def place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in SKIPPED):
            short = path.removeprefix(str(Path(PACKAGE).parent) + "/").rpartition("site-packages/")[2]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"
