"""Counts kernel launches, and waits for the device by the place in Python that causes them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import megarl
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


def place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in SKIPPED):
            short = path.removeprefix(str(Path(PACKAGE).parent) + "/").rpartition("site-packages/")[2]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"
