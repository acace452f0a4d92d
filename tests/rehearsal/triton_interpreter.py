"""Makes Triton's interpreter take tensors of the rehearsal device, and compute rightly with bfloat16.

The interpreter keeps a bfloat16 as a 16-bit integer. It converts these from and to float32, but multiplies and adds the
integers themselves, silently. With this module matrix products convert first, conversions round as on a GPU, and any
other operation on bfloat16 raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.rehearsal.device import lib


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, to the nearest, ties to even."""
    contiguous = np.ascontiguousarray(values)
    return torch.from_numpy(contiguous).bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def mend(interpreter: Any) -> None:
    builder, bfloat16, float32 = interpreter.InterpreterBuilder, interpreter.tl.bfloat16, interpreter.tl.float32
    handle, cast, dot = interpreter.TensorHandle, builder.cast_impl, builder.create_dot
    convert = builder.create_fp_to_fp

    def is_bfloat16(x: Any) -> bool:
        return x.dtype.scalar == bfloat16

    def wide(x: Any) -> Any:
        return handle(widened(x.data), float32) if is_bfloat16(x) else x

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if to.scalar != bfloat16:
            return cast(self, wide(x), to)
        return x if is_bfloat16(x) else handle(rounded(cast(self, x, float32).data), bfloat16)

    def fp_to_fp(self: Any, x: Any, to: Any, rounding: Any) -> Any:
        either = is_bfloat16(x) or to.scalar == bfloat16
        return cast_impl(self, x, to) if either else convert(self, x, to, rounding)

    def multiply(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        assert not is_bfloat16(d), "a matrix unit accumulates in float32"
        return dot(self, wide(a), wide(b), d, *options)

    def refused(operation: Any) -> Any:
        def checked(self: Any, *args: Any) -> Any:
            if any(isinstance(x, handle) and is_bfloat16(x) for x in args):
                raise NotImplementedError("Triton's interpreter would compute with the bits of a bfloat16")
            return operation(self, *args)

        return checked

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, fp_to_fp, multiply
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, refused(getattr(builder, name)))
    _take_device_tensors(interpreter)


def _take_device_tensors(interpreter: Any) -> None:
    """Give kernels the device's own bytes, where the interpreter would copy all arguments to the host and back."""
    executor = interpreter.GridExecutor

    def to_host(self: Any, args: Any, kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            x = getattr(x, "base", x)  # the tensor of a descriptor
            if isinstance(x, torch.Tensor) and not x.is_cuda:
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        lib.launched(self.fn.__name__)
        return args, kwargs

    executor._init_args_hst = to_host
    executor._restore_args_dev = lambda self, *_: None
