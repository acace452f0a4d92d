"""The gated delta rule over packed sequences, in torch alone.

Yang et al. 2024, arXiv 2412.06464, section 3: a head has a state S [key width, value width], zero where a sequence
begins. Token t with key k, value v, decay a = exp(g) and rate b updates it,
    S_t = a S_{t-1} + b k (v - a S_{t-1}' k)',
and its query q outputs S_t' q. A whole chunk of tokens takes a few matrix products and one triangular system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from megarl.actor.transfer import to_device
from megarl.batch import ContextShard
from megarl.models.delta_net import CHUNK


@dataclass(frozen=True)
class SequenceChunks:
    """Indices of the tokens of packed sequences when each sequence is cut into chunks, the last one padded.

    All first chunks come first, then all second ones and so on; chunks of the same number are ordered by the length of
    their sequence, so the sequences that have a next chunk are always the last ones among those of this number.
    """

    size: int  # tokens per chunk
    counts: tuple[int, ...]  # number of sequences that have a chunk of number 0, 1, ..
    rows: torch.Tensor  # [T] int64, index of each token on the axis of all chunks' tokens
    sequences: torch.Tensor  # [T] int64, the sequence of each token, in the order of the packed axis
    # [T] int64 with context parallelism: index on the packed axis of each token held by rank 0, then by rank 1, ..
    gathered: torch.Tensor | None


def sequence_chunks(
    length_runs: Sequence[tuple[int, int]], shard: ContextShard | None, device: torch.device, size: int = CHUNK
) -> SequenceChunks:
    """Cut sequences into chunks. length_runs: (count, length) of consecutive sequences of equal length; with a
    ``shard`` the lengths are those of whole padded sequences."""
    counts, each = np.array(length_runs, np.int64).T
    lengths = each.repeat(counts)
    numbers = -(-lengths // size)
    active = [int((numbers > i).sum()) for i in range(int(numbers.max()))]
    first = np.concatenate([[0], np.cumsum(active)])  # index of the first of the chunks with number i
    rank = np.empty(len(lengths), np.int64)
    rank[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
    sequences = np.arange(len(lengths)).repeat(lengths)
    position = np.arange(len(sequences)) - (np.cumsum(lengths) - lengths)[sequences]
    number = position // size
    chunk = first[number] + rank[sequences] - (len(lengths) - np.array(active)[number])

    tensor = partial(to_device, device)
    gathered = None
    if shard is not None:
        held = [replace(shard, rank=r).held_tokens(lengths) for r in range(shard.size)]
        gathered = tensor(np.concatenate(held))
    return SequenceChunks(size, tuple(active), tensor(chunk * size + position % size), tensor(sequences), gathered)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, chunks: SequenceChunks) -> torch.Tensor:
    """Depthwise convolution: x [T, C], weight [C, 1, K] -> [T, C], each token from the last K tokens of its sequence.

    The last weight of a channel belongs to the token itself."""
    channels, _, taps = weight.shape
    rows = torch.arange(len(x), device=x.device) + (taps - 1) * chunks.sequences
    # K - 1 zeros before every sequence keep it from the one before
    spaced = x.new_zeros(len(x) + (taps - 1) * chunks.counts[0], channels).index_put((rows + taps - 1,), x)
    count, wide = len(spaced) - taps + 1, weight[:, 0].float()
    convolved = spaced[:count] * wide[:, 0]
    for tap in range(1, taps):
        convolved = convolved + spaced[tap : tap + count] * wide[:, tap]
    return convolved.to(x.dtype).index_select(0, rows)


def gated_delta_rule(
    query: torch.Tensor,  # [T, heads, key width], unit vectors
    key: torch.Tensor,  # [T, heads, key width], unit vectors
    value: torch.Tensor,  # [T, heads, value width]
    decay: torch.Tensor,  # [T, heads], logarithm g of the decay, at most 0
    rate: torch.Tensor,  # [T, heads], in (0, 1)
    chunks: SequenceChunks,
) -> torch.Tensor:
    """The outputs S_t' q / sqrt(key width), [T, heads, value width] float32; all inputs are float32."""
    total, size = sum(chunks.counts), chunks.size

    def in_chunks(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(total * size, *x.shape[1:]).index_put((chunks.rows,), x)
        return padded.view(total, size, *x.shape[1:]).transpose(1, 2).contiguous()  # [chunks, heads, tokens, ..]

    query, key, value, decay, rate = map(in_chunks, (query, key, value, decay, rate))
    query = query * query.shape[-1] ** -0.5
    since = decay.cumsum(-1)  # logarithm of the total decay since the beginning of the chunk
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    scaled = key * rate[..., None]
    # what a token adds to the state depends on the tokens before it in the chunk: a unit triangular system
    system = scaled @ key.mT * between
    own = torch.linalg.solve_triangular(system, value * rate[..., None], upper=False, unitriangular=True)
    seen = torch.linalg.solve_triangular(system, scaled * since.exp()[..., None], upper=False, unitriangular=True)
    inside = query @ key.mT * between
    reading = query * since.exp()[..., None]
    writing = key * (since[..., -1:] - since).exp()[..., None]
    kept = since[..., -1].exp()[..., None, None]  # factor by which the chunk decays the state before it
    parts = [x.split(chunks.counts) for x in (own, seen, inside, reading, writing, kept)]
    state = key.new_zeros(chunks.counts[0], key.shape[1], key.shape[-1], value.shape[-1])
    outputs = []
    for own, seen, inside, reading, writing, kept in zip(*parts, strict=True):
        state = state[len(state) - len(own) :]
        written = own - seen @ state
        outputs.append(reading @ state + inside @ written)
        state = state * kept + writing.mT @ written
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.rows)
