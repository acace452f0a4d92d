"""The gated delta rule over packed sequences, in torch alone.

Yang et al. 2024, arXiv 2412.06464, section 3: a head has a state S [key width, value width], zero where a sequence
begins. Token t with key k, value v, decay a = exp(g) and rate b makes S_t = a S_{t-1} + b k (v - a S_{t-1}' k)', of
which its query reads S_t' q. In chunks of tokens this is a few matrix products and one triangular system a chunk.
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
    """Where the tokens of packed sequences stand when each sequence is cut into chunks, the last one padded.

    Chunks are ordered by their number in their sequence, and those of one number by the length of the sequence: so the
    sequences that go on are always the last ones of the chunks before.
    """

    size: int  # tokens of a chunk
    counts: tuple[int, ...]  # sequences that have a chunk of number 0, 1, ..
    rows: torch.Tensor  # [T] int64, of each token among the tokens of all chunks
    sequences: torch.Tensor  # [T] int64, the sequence of each token, in the order of the packed axis
    gathered: torch.Tensor | None  # [T] int64 under context parallelism: of each token that ranks hold, rank by rank


def sequence_chunks(
    length_runs: Sequence[tuple[int, int]], shard: ContextShard | None, device: torch.device, size: int = CHUNK
) -> SequenceChunks:
    """``length_runs``: (count, length) of consecutive sequences; with a ``shard``, of whole, padded sequences."""
    counts, each = np.array(length_runs, np.int64).T
    lengths = each.repeat(counts)
    numbers = -(-lengths // size)
    active = [int((numbers > i).sum()) for i in range(int(numbers.max()))]
    first = np.concatenate([[0], np.cumsum(active)])  # chunk of number i of the shortest sequence that has one
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
    """x [T, C], weight [C, 1, K] -> [T, C]: of each channel the last K tokens of its sequence, the newest last."""
    channels, _, taps = weight.shape
    rows = torch.arange(len(x), device=x.device) + (taps - 1) * chunks.sequences
    # zeros before every sequence, so that it sees nothing of the one before
    apart = x.new_zeros(len(x) + (taps - 1) * chunks.counts[0], channels).index_put((rows + taps - 1,), x)
    count, wide = len(apart) - taps + 1, weight[:, 0].float()
    convolved = apart[:count] * wide[:, 0]
    for tap in range(1, taps):
        convolved = convolved + apart[tap : tap + count] * wide[:, tap]
    return convolved.to(x.dtype).index_select(0, rows)


def gated_delta_rule(
    query: torch.Tensor,  # [T, heads, key width], of length 1 each
    key: torch.Tensor,  # [T, heads, key width], of length 1 each
    value: torch.Tensor,  # [T, heads, value width]
    decay: torch.Tensor,  # [T, heads], logarithms, at most 0
    rate: torch.Tensor,  # [T, heads], in (0, 1)
    chunks: SequenceChunks,
) -> torch.Tensor:
    """What queries read, [T, heads, value width] float32; all inputs are float32."""
    total, size = sum(chunks.counts), chunks.size

    def in_chunks(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(total * size, *x.shape[1:]).index_put((chunks.rows,), x)
        return padded.view(total, size, *x.shape[1:]).transpose(1, 2).contiguous()  # [chunks, heads, tokens, ..]

    query, key, value, decay, rate = map(in_chunks, (query, key, value, decay, rate))
    query = query * query.shape[-1] ** -0.5
    since = decay.cumsum(-1)  # logarithm of the decay since the beginning of the chunk
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    scaled = key * rate[..., None]
    # the values that the tokens of a chunk write depend on each other: a system with ones on its diagonal
    system = scaled @ key.mT * between
    own = torch.linalg.solve_triangular(system, value * rate[..., None], upper=False, unitriangular=True)
    seen = torch.linalg.solve_triangular(system, scaled * since.exp()[..., None], upper=False, unitriangular=True)
    inside = query @ key.mT * between
    reading = query * since.exp()[..., None]
    writing = key * (since[..., -1:] - since).exp()[..., None]
    kept = since[..., -1].exp()[..., None, None]  # of a state, after the chunk
    parts = [x.split(chunks.counts) for x in (own, seen, inside, reading, writing, kept)]
    state = key.new_zeros(chunks.counts[0], key.shape[1], key.shape[-1], value.shape[-1])
    outputs = []
    for own, seen, inside, reading, writing, kept in zip(*parts, strict=True):
        state = state[len(state) - len(own) :]
        written = own - seen @ state
        outputs.append(reading @ state + inside @ written)
        state = state * kept + writing.mT @ written
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.rows)
