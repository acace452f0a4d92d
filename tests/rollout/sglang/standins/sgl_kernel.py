"""For tests only: SGLang's compiled kernels, which need a CPU with AMX, in torch.

SGLang imports many more names of functions, which raise an error if they are called.
"""

import torch

WORD = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(rows, table, begins, ends, locations, _):
    """table[rows[i], begins[i]:ends[i]] = the next ``ends[i] - begins[i]`` of ``locations``."""
    sizes = (ends - begins).tolist()
    for row, begin, end, part in zip(
        rows.tolist(), begins.tolist(), ends.tolist(), locations[: sum(sizes)].split(sizes), strict=True
    ):
        table[row, begin:end] = part.to(table.dtype)


def murmur_hash32_cpu(seeds, positions, columns):
    """MurmurHash3 of (seed, low word, high word, position, column), 32 bits: uint32 [len(seeds), len(columns)].

    Computed in int64: the low 32 bits of a product are right even if it overflows.
    """
    seeds, positions = seeds.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    state = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions, columns.to(torch.int64)[None]):
        word = _rotate(((word & WORD) * 0xCC9E2D51) & WORD, 15) * 0x1B873593
        state = (_rotate(state ^ (word & WORD), 13) * 5 + 0xE6546B64) & WORD
    state = state ^ 16  # bytes
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & WORD
    return (state ^ (state >> 16)).to(torch.uint32)


def _rotate(word, bits):
    return ((word << bits) | (word >> (32 - bits))) & WORD


LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
LIBRARY.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return absent
