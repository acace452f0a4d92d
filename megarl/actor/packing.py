"""Packs the responses of one update into micro-batches within a token budget.

Every rank computes the same assignment from all lengths, so the ranks agree without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from megarl.actor.attention import AttendedKeys, PackedSequences
from megarl.actor.transfer import to_device
from megarl.batch import ContextShard, TokenBatch


@dataclass(frozen=True)
class Sample:
    """One response with its prompt, on the host."""

    prompt_tokens: np.ndarray  # [P] int32
    response_tokens: np.ndarray  # [R] int32
    rollout_logprobs: np.ndarray  # [R] float32
    advantage: float
    trained: bool = True  # False: stays in the batch, but none of its tokens has a loss
    routed_experts: np.ndarray | None = None  # [len(self), layers, top_k] int, experts that the engine recorded
    loss_mask: np.ndarray | None = None  # [R] bool, False for tokens that the policy did not sample; None: all True

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with a loss."""
        sampled = len(self.response_tokens) if self.loss_mask is None else int(self.loss_mask.sum())
        return sampled if self.trained else 0

    def __len__(self) -> int:
        # number of input tokens: the last token is only a label
        return len(self.prompt_tokens) + len(self.response_tokens) - 1


@dataclass(frozen=True)
class MicroBatch:
    """T packed input tokens for the model, and the objective's batch of N <= T of their labels.

    Without context parallelism ``batch`` has the response tokens only, packed anew, since prompt tokens would only be
    masked out. Under context parallelism all tensors hold this rank's chunks, and ``batch`` has every token of them
    (N = T less the filler), because prefix minima and sequence sums need chunks of equal length on every rank.
    """

    tokens: torch.Tensor  # [1, T] int64
    labels: torch.Tensor  # [1, T] int64, the token after each input
    positions: torch.Tensor  # [1, T] int64
    packed: PackedSequences
    batch: TokenBatch  # N tokens; logprobs are NaN until `megarl.actor.schedule.token_batch` fills in the model's
    token_count: int  # labels with a loss
    sequence_count: int  # sequences with at least one such label; counted on the first context-parallel rank, else 0
    # layer number, from 1 -> [tokens that this rank's routers see, top_k] int; -1: the router chooses itself
    routed_experts: dict[int, torch.Tensor] | None = None


def assign(lengths: Sequence[int], replicas: int, budget: int, rounds: int = 1) -> list[list[list[int]]]:
    """Indices into ``lengths`` as [replica][micro-batch][...], every replica with the same number of micro-batches.

    Samples are placed longest first, each into the emptiest bin (micro-batch); the number of bins is the smallest for
    which this keeps every bin within ``budget`` tokens. A sample longer than the budget gets a bin of its own. Bins may
    stay empty when there are fewer samples than replicas, or when the number of micro-batches of a replica must be a
    multiple of ``rounds``.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    alone = sum(length > budget for length in lengths)
    shared = -(-sum(length for length in lengths if length <= budget) // budget)
    per_replica = -(-(alone + shared) // (replicas * rounds)) * rounds
    while True:
        bins: list[list[int]] = [[] for _ in range(replicas * per_replica)]
        load = [0] * len(bins)
        for index in order:
            target = min(range(len(bins)), key=load.__getitem__)
            bins[target].append(index)
            load[target] += lengths[index]
        if all(size <= budget or len(bin) == 1 for size, bin in zip(load, bins, strict=True)):
            return [[sorted(bin) for bin in bins[r::replicas]] for r in range(replicas)]
        per_replica += rounds


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    device: torch.device,
    tokens: int | None = None,
    shard: ContextShard | None = None,
) -> MicroBatch:
    """Concatenate samples, sorted by length, without padding. indices: the samples' places in the optimizer batch.

    shard: each sequence is padded to a multiple of the shard's number of chunks, and only this rank's chunks are kept.
    tokens: length of the packed axis over all context-parallel ranks; if it exceeds the samples' tokens, filler
    sequences without labels follow.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    samples = [samples[i] for i in order]
    lengths = _padded_lengths(samples, shard)
    real = int(lengths.sum())
    filler = 0 if tokens is None else tokens - real
    columns = _columns(samples, lengths, filler)
    # filler sequences are no longer than the longest sample, which keeps their attention cheap
    extra = [lengths[-1]] * (filler // lengths[-1]) + [filler % lengths[-1]] * bool(filler % lengths[-1])
    runs = np.append(lengths, np.array(extra, np.int64))
    kept = shard.held_tokens(runs) if shard else np.arange(real + filler)
    columns = {name: column[kept] for name, column in columns.items()}
    trained = columns["is_response"].nonzero()[0]
    sizes = lengths // shard.size if shard else np.array([len(s.response_tokens) for s in samples])
    in_batch = slice(0, int(sizes.sum())) if shard else trained  # the tokens of the objective's batch
    mask = columns["loss_mask"][in_batch]

    tensor = partial(to_device, device)
    cu_seqlens, longest = tensor(_offsets(runs)), int(runs.max())
    return MicroBatch(
        tokens=tensor(columns["tokens"])[None],
        labels=tensor(columns["labels"])[None],
        positions=tensor(columns["positions"])[None],
        packed=PackedSequences(
            qkv_format="thd",
            # boundaries of whole padded sequences: padding is at their ends, where no other token attends to it
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            length_runs=tuple((len(list(run)), int(length)) for length, run in groupby(runs)),
            trained=tensor(trained),
            shard=shard,
            attended=_attended_keys(runs, shard, device) if shard and device.type == "cuda" else None,
        ),
        batch=TokenBatch(
            logprobs=torch.full(mask.shape, torch.nan, device=device),
            rollout_logprobs=tensor(columns["rollout_logprobs"][in_batch]),
            advantages=tensor(columns["advantages"][in_batch]),
            loss_mask=tensor(mask),
            cu_seqlens=tensor(_offsets(sizes)),
            sequence_index=tensor(np.array([indices[i] for i in order], np.int64)),
            shard=shard,
        ),
        token_count=int(mask.sum()),
        sequence_count=sum(s.trained_tokens > 0 for s in samples) if shard is None or shard.rank == 0 else 0,
        routed_experts=_routed_experts(samples, lengths, filler, kept, device),
    )


def _attended_keys(lengths: np.ndarray, shard: ContextShard, device: torch.device) -> AttendedKeys:
    rows, counts = shard.attended_tokens(lengths)
    queries = np.repeat(lengths // shard.chunks, 2)
    return AttendedKeys(
        rows=to_device(device, rows),
        cu_seqlens_q=to_device(device, _offsets(queries)),
        cu_seqlens_k=to_device(device, _offsets(counts)),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int(counts.max()),
    )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """[len(sizes) + 1] int32, cu_seqlens: where each packed sequence begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _routed_experts(
    samples: Sequence[Sample], lengths: np.ndarray, filler: int, kept: np.ndarray, device: torch.device
) -> dict[int, torch.Tensor] | None:
    """`MicroBatch.routed_experts` from the samples' records, -1 where there are none; None if no sample has one."""
    kinds = {(s.routed_experts.shape[1:], s.routed_experts.dtype) for s in samples if s.routed_experts is not None}
    if not kinds:
        return None
    ((shape, dtype),) = kinds
    experts = np.full((int(lengths.sum()) + filler, *shape), -1, dtype)
    for sample, start in zip(samples, np.cumsum(lengths) - lengths, strict=True):
        if sample.routed_experts is not None:
            experts[start : start + len(sample)] = sample.routed_experts
    on_device = to_device(device, experts[kept].swapaxes(0, 1))
    return {layer + 1: chosen for layer, chosen in enumerate(on_device)}


def _padded_lengths(samples: Sequence[Sample], shard: ContextShard | None) -> np.ndarray:
    chunks = shard.chunks if shard else 1
    return np.array([-(-len(s) // chunks) * chunks for s in samples], np.int64)


def packed_length(samples: Sequence[Sample], multiple: int, shard: ContextShard | None) -> int:
    """Length of the packed axis of a micro-batch over all context-parallel ranks: the smallest that holds the samples
    and gives each rank a multiple of ``multiple`` tokens."""
    chunks = shard.chunks if shard else 1
    return -(-int(_padded_lengths(samples, shard).sum()) // (multiple * chunks)) * multiple * chunks


def _columns(samples: Sequence[Sample], lengths: np.ndarray, filler: int) -> dict[str, np.ndarray]:
    """Per-token arrays over the whole packed axis, zero in the padding of sequences and in the filler at the end."""
    total = int(lengths.sum()) + filler
    columns = {name: np.zeros(total, np.int64) for name in ("tokens", "labels", "positions")}
    columns |= {name: np.zeros(total, np.float32) for name in ("rollout_logprobs", "advantages")}
    columns |= {name: np.zeros(total, bool) for name in ("is_response", "loss_mask")}
    for sample, start in zip(samples, np.cumsum(lengths) - lengths, strict=True):
        sequence = np.concatenate([sample.prompt_tokens, sample.response_tokens])
        end = start + len(sample)
        columns["tokens"][start:end] = sequence[:-1]
        columns["labels"][start:end] = sequence[1:]
        columns["positions"][start:end] = np.arange(len(sample))
        response = slice(end - len(sample.response_tokens), end)
        columns["rollout_logprobs"][response] = sample.rollout_logprobs
        columns["advantages"][response] = sample.advantage
        columns["is_response"][response] = True
        columns["loss_mask"][response] = (
            sample.trained if sample.loss_mask is None else sample.trained & sample.loss_mask
        )
    return columns


def context_shard() -> ContextShard | None:
    """This rank's part of every sequence; None without context parallelism."""
    size = mpu.get_context_parallel_world_size()
    if size == 1:
        return None
    return ContextShard(mpu.get_context_parallel_group(), mpu.get_context_parallel_rank(), size)


def micro_batches(samples: Sequence[Sample], budget: int, device: torch.device, align: int = 1) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of an update; every rank gets the same number of them.

    budget: tokens of a micro-batch. align: the tokens that each rank multiplies with a matrix are a multiple of this,
    as fp8 needs it (`megarl.recipe.megatron.token_alignment`). Sequence parallelism needs T to be a multiple of its
    ranks. Virtual pipeline stages need all micro-batches equally long, and their number to be a multiple of the
    pipeline ranks.
    """
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size() is not None
    rounds = mpu.get_pipeline_model_parallel_world_size() if virtual else 1
    bins = assign([len(s) for s in samples], replicas, budget, rounds)[replica]
    filler = replace(min(samples, key=len), trained=False)  # an empty bin still takes part in every collective
    parts = [[samples[i] for i in bin] or [filler] for bin in bins]
    shard, multiple = context_shard(), align * mpu.get_tensor_model_parallel_world_size()
    tokens = [packed_length(part, multiple, shard) for part in parts]
    if virtual:
        tokens = [max(tokens)] * len(parts)
    packed = [
        pack(part, bin or [len(samples)], device, length, shard)
        for part, bin, length in zip(parts, bins, tokens, strict=True)
    ]
    return [_sequence_parallel(batch) for batch in packed]


def _sequence_parallel(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with ``routed_experts`` of this rank's tokens only, which its routers see under sequence
    parallelism."""
    if batch.routed_experts is None or mpu.get_tensor_model_parallel_world_size() == 1:
        return batch
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return replace(batch, routed_experts={k: v.chunk(size)[rank] for k, v in batch.routed_experts.items()})
