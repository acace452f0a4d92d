"""Converts weights quantised as MXFP4, the format in which gpt-oss is published, to bfloat16.

The experts' tensor ``P`` [E, inputs, outputs] is stored as two tensors of uint8. ``P_blocks`` [E, outputs, inputs / 32,
16] has two four-bit values (e2m1) in each byte, the low half first. ``P_scales`` [E, outputs, inputs / 32] has the
exponent of the power of two by which 32 values are multiplied, plus 127 (e8m0): Rouhani et al. 2023, arXiv 2310.10537.
The result equals that of `transformers.integrations.mxfp4` in transformers 5.19.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megarl.errors import UserError
from megarl.storage.files import file_sha256
from megarl.storage.tensor_files import Region, TensorFiles, create_file
from megarl.storage.weights import INDEX_FILE

_BLOCK_BYTES = 4 << 20
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the e2m1 values without sign
_VALUES = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.bfloat16)
# for each byte its two bfloat16 values, as one int32
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1).view(torch.int32)[:, 0]


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks, uint8 [..., groups, 16], with scales, uint8 [..., groups], to bfloat16 [..., groups * 32]."""
    values = _PAIRS[blocks.int()].view(torch.bfloat16)
    return torch.ldexp(values, scales.int()[..., None] - 127).to(torch.bfloat16).flatten(-2)


def write_bfloat16(source_dir: Path, target_dir: Path) -> dict[str, str]:
    """Write the weight files of a quantised model and their index to ``target_dir``; returns {file name: sha256}.

    The files keep their names, and tensors that are not quantised keep their bytes. At most one matrix of an expert is
    in memory at a time, also as float32. Raises `UserError` if blocks or scales are missing or their shapes do not fit.
    """
    with TensorFiles.of_directory(source_dir) as source, TensorFiles() as target:
        files: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
        for name, region in source.regions.items():
            entry = (name, region.dtype, region.shape)
            if name.endswith("_scales"):
                _matching(source, name.removesuffix("_scales"))
                continue
            if name.endswith("_blocks"):
                name = name.removesuffix("_blocks")
                experts, outputs, groups, _ = _matching(source, name)[0].shape
                entry = (name, torch.bfloat16, (experts, groups * 32, outputs))
            files.setdefault(Path(str(region.file.name)).name, []).append(entry)
        for file, tensors in files.items():
            create_file(target_dir / file, tensors)
            target.add(target_dir / file, "r+b")
        for name, region in target.regions.items():
            if name in source.regions:
                source.regions[name].copy_to(region, _BLOCK_BYTES)
            else:
                _write(*_matching(source, name), region)
    if (source_dir / INDEX_FILE).exists():
        names = {name: file for file, tensors in sorted(files.items()) for name, *_ in tensors}
        total = sum(region.nbytes for region in target.regions.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (target_dir / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    return {file: file_sha256(target_dir / file) for file in files}


def _matching(source: TensorFiles, name: str) -> tuple[Region, Region]:
    """The blocks and scales of tensor ``name``; `UserError` if they are not what the format demands."""
    blocks, scales = (source.regions.get(f"{name}_{kind}") for kind in ("blocks", "scales"))
    if blocks is None or scales is None:
        raise UserError(f"tensor {name!r} of MXFP4 weights has no {'blocks' if blocks is None else 'scales'}")
    if name in source.regions:
        raise UserError(f"tensor {name!r} exists twice: as it is, and as MXFP4 blocks")
    if {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise UserError(f"tensor {name!r} of MXFP4 weights has dtypes {blocks.dtype} and {scales.dtype}, not uint8")
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
        raise UserError(f"tensor {name!r} of MXFP4 weights has blocks {blocks.shape} and scales {scales.shape}")
    return blocks, scales


def _write(blocks: Region, scales: Region, target: Region) -> None:
    """Dequantise one tensor expert by expert; each matrix is stored [outputs, inputs] and written transposed."""
    for expert in range(blocks.shape[0]):
        parts = [region.part(expert, region.shape[1:]) for region in (blocks, scales)]
        matrix = dequantised(*(part.read(0, part.shape[0]) for part in parts))
        target.part(expert, target.shape[1:]).write(0, matrix.t())
