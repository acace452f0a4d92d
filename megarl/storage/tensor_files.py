"""Reads and writes safetensors files by position, a few rows of a tensor at a time.

The safetensors library maps whole files into memory, and writes a file only from tensors that are all in memory, so a
rank would hold its share of the model twice. A file consists of eight bytes with the header's length, the header
(JSON), and the tensors' bytes, row-major and without gaps.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import UserError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS = re.compile(r"(?P<name>.+)\[(?P<first>\d+):(?P<end>\d+):(?P<rows>\d+)\]")
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Region:
    """The position of one row-major tensor in a file; its first dimension, which always exists, is called rows."""

    file: FileIO  # opened without buffering
    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def part(self, index: int, shape: tuple[int, ...]) -> Region:
        """Number ``index`` of the consecutive tensors of shape ``shape`` that this tensor consists of."""
        return replace(self, offset=self.offset + index * math.prod(shape) * self.dtype.itemsize, shape=shape)

    def rows(self, first: int, end: int, rows: int) -> Region:
        """Rows ``first`` to ``end`` (exclusive) of a tensor that has ``rows`` rows; the whole tensor if it has not."""
        if self.shape[0] != rows:
            return self
        return replace(self, offset=self.offset + first * self.row_bytes, shape=(end - first, *self.shape[1:]))

    def read(self, first: int, rows: int) -> torch.Tensor:
        """Load ``rows`` rows, beginning with row ``first``; `UserError` if the file ends before."""
        buffer = torch.empty(rows * self.row_bytes, dtype=torch.uint8)
        view, done = memoryview(buffer.numpy().data), 0
        while done < len(view):
            count = os.preadv(self.file.fileno(), [view[done:]], self.offset + first * self.row_bytes + done)
            if count == 0:
                raise UserError(f"{self.file.name} is too short for its tensors: it is damaged or still being written")
            done += count
        return buffer.view(self.dtype).view(rows, *self.shape[1:])

    def copy_to(self, target: Region, block_bytes: int) -> None:
        """Copy this tensor to ``target``, a region of the same dtype and shape, about ``block_bytes`` at a time."""
        rows = max(1, block_bytes // max(1, self.row_bytes))
        for first in range(0, self.shape[0], rows):
            target.write(first, self.read(first, min(rows, self.shape[0] - first)))

    def write(self, first: int, tensor: torch.Tensor) -> None:
        """Write the rows of ``tensor`` to the file, beginning at row ``first``."""
        tensor = tensor.to("cpu", self.dtype).contiguous()
        view, done = memoryview(tensor.view(-1).view(torch.uint8).numpy().data), 0
        while done < len(view):
            done += os.pwrite(self.file.fileno(), view[done:], self.offset + first * self.row_bytes + done)


class TensorFiles:
    """All tensors of some safetensors files by name; experts inside fused tensors have names too.

    With P = ``model.layers.n.mlp.experts`` and expert e: a fused tensor ``P.gate_up_proj`` [E, 2 I, H] contains
    ``P.e.gate_proj.weight`` and ``P.e.up_proj.weight`` [I, H], and ``P.down_proj`` [E, H, I] contains
    ``P.e.down_proj.weight`` [H, I]. A name without ".weight", such as ``P.e.down_proj_bias``, is the part of expert e
    as it is stored; in such gate and up projections the two alternate in the last dimension, which is returned as two
    dimensions, [..., I, 2]. ``N[a:b:n]`` is rows a to b of a tensor ``N`` of n rows.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self.regions: dict[str, Region] = {}
        self._open = ExitStack()
        for path in paths:
            self.add(path)

    def add(self, path: Path, mode: Literal["rb", "r+b"] = "rb") -> None:
        """Open one more file (mode "r+b": to write its tensors); `UserError` if it is damaged or repeats a tensor."""
        file = self._open.enter_context(open(path, mode, buffering=0))  # noqa: SIM115, closed by `__exit__`
        for name, region in _read_header(path, file).items():
            if name in self.regions:
                raise UserError(f"tensor {name!r} is both in {self.regions[name].file.name} and in {path}")
            self.regions[name] = region

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def stored_name(self, name: str) -> str | None:
        """The name under which the files store tensor ``name``: ``name`` or a fused tensor's; None if they do not."""
        if name in self.regions:
            return name
        if part := _ROWS.fullmatch(name):
            return part["name"] if part["name"] in self.regions else None
        fused = _fused_name(name)
        return fused if fused in self.regions else None

    def region(self, name: str) -> Region | None:
        """The position of tensor ``name``, which may be inside a fused one; None if the files do not have it."""
        stored = self.stored_name(name)
        if stored is None or stored == name:
            return self.regions.get(name)
        if part := _ROWS.fullmatch(name):
            return self.regions[stored].rows(int(part["first"]), int(part["end"]), int(part["rows"]))
        return self._of_expert(stored, name.partition(".mlp.experts.")[2])

    def _of_expert(self, stored: str, inside: str) -> Region | None:
        """The part ``inside``, such as "7.up_proj.weight", of the fused tensor ``stored``; None if it has no such part.

        `UserError` if the dimension of gate and up projections is odd, so that it cannot be halved.
        """
        whole = self.regions[stored]
        number, kind, *weight = inside.split(".")
        expert, shape = int(number), whole.shape[1:]
        if expert >= whole.shape[0] or not shape or (weight and len(shape) != 2):
            return None
        if kind.startswith("down_proj"):
            return whole.part(expert, shape)
        if (both := shape[0] if weight else shape[-1]) % 2:
            raise UserError(f"{whole.file.name}: {stored} has {both} gate and up projections, an odd number")
        if weight:
            return whole.part(2 * expert + (kind == "up_proj"), (both // 2, shape[1]))
        return whole.part(expert, (*shape[:-1], both // 2, 2))


def _fused_name(name: str) -> str:
    """model.layers.3.mlp.experts.7.up_proj.weight -> model.layers.3.mlp.experts.gate_up_proj"""
    prefix, experts, rest = name.partition(".mlp.experts.")
    if experts and not rest.endswith(".weight"):
        return f"{prefix}{experts}{rest.partition('.')[2]}"
    return f"{prefix}{experts}{'down_proj' if rest.endswith('.down_proj.weight') else 'gate_up_proj'}"


def _read_header(path: Path, file: FileIO) -> dict[str, Region]:
    """The positions of all tensors of a file; `UserError` if it is damaged, or has dtypes that megarl does not read."""
    try:
        with safe_open(path, "numpy"):  # checks the header, and that the tensors fill the file
            length = struct.unpack("<Q", file.read(8))[0]
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error
    regions = {}
    for name, entry in json.loads(file.read(length)).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"{path}: tensor {name!r} has dtype {entry['dtype']}; megarl reads tensors that are not quantised "
                f"({', '.join(_DTYPES)})"
            )
        position = 8 + length + entry["data_offsets"][0]
        regions[name] = Region(file, position, _DTYPES[entry["dtype"]], tuple(entry["shape"]) or (1,))
    return regions


def create_file(path: Path, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
    """Create a safetensors file with its final length, whose tensors are to be written later.

    Header and order of tensors are those of the library: larger dtypes first, so that every tensor is aligned, then by
    name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-tensor[1].itemsize, tensor[0])):
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
