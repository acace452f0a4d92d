"""Packs the responses of one update into micro-batches within a token budget.

**A prompt is computed once.** The responses of a group share their prompt, so a micro-batch holds it once::

    what is packed      A B C      D | u v w      D | x y
    the label of each   - - -      u | v w .      x | y .       ("." ends a response and has no label after it)
    positions           0 1 2      3 | 4 5        3 | 4

The prompt A B C D is packed without its last token: that is a *stem*. Each response, here u v w . and x y ., begins
with the last token of the prompt, whose label is its first token; so every trained label has a row of its own. In
attention the tokens of a response see the rows of the stem and their own (`attended`); all else in a layer treats each
row alone. So log-probs and gradients are those of whole sequences. If a group falls apart over micro-batches, each has
the stem. Prompts with different recorded experts are different prompts.

Sequences are packed whole where they cannot share (`megarl.recipe.megatron.shares_prompts`), and where that would save
less than a 32nd of the update's tokens.

Micro-batches are balanced by their tokens, though what attention computes grows with the square of a length: balanced
by operations, 512 responses of log-normal lengths up to 32k tokens on 4 to 16 replicas of Qwen3-30B-A3B took at most
.8 % less, where ranks wait for each other at every micro-batch. For the longest responses are placed first, each into
another micro-batch.

Every rank computes the same assignment from all lengths, so the ranks agree without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from megarl.actor.attention import PackedSequences, attended, offsets
from megarl.actor.transfer import to_device
from megarl.batch import ContextShard, TokenBatch

_KEYS = 4  # times the budget: as many keys may a micro-batch attend to, since a layer gathers a copy for each response
_LEAST_SHARED = 1 / 32  # of an update's tokens; see `_sharing_pays`


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
    group: int = 0  # place of its group in the optimizer batch

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
    masked out. Under context parallelism all tensors hold this rank's chunks, and ``batch`` has every token of those of
    the samples, which come before stems and filler, because prefix minima and sequence sums need chunks of equal length
    on every rank.
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

    def trained_inputs(self) -> torch.Tensor:
        """[tokens that this rank's routers see] float64: 1 for the inputs whose label has a loss, else 0."""
        mask, every = self.batch.loss_mask, torch.zeros_like(self.tokens[0], dtype=torch.float64)
        if self.batch.shard is not None:
            every[: mask.numel()] = mask.double()
        elif self.packed.trained is not None:
            every.index_copy_(0, self.packed.trained, mask.double())
        size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        return every.chunk(size)[rank]  # as under sequence parallelism


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


def assign_groups(
    samples: Sequence[Sample], replicas: int, budget: int, rounds: int, share: bool
) -> list[list[list[int]]]:
    """As `assign`, for samples of which those with the same prompt are packed together.

    A group costs least in one micro-batch, but whole groups may leave replicas idle. So they are also cut into 2, 4, ..
    parts, down to single samples, and the assignment is taken that computes the fewest tokens one after another: summed
    over micro-batches, those of the replica that has the most.
    """
    groups: dict[Any, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(_prompt_key(sample) if share else index, []).append(index)
    fewest, parts = math.inf, 1
    best: list[list[list[int]]] = []
    while True:
        cut = [part for members in groups.values() for part in _cut(samples, members, parts, budget)]
        sizes = [_load(samples, members) for members in cut]
        if sum(sizes) >= fewest * replicas:
            return best  # smaller parts compute more tokens
        bins = assign(sizes, replicas, budget, rounds)
        in_turn = sum(max(sum(sizes[i] for i in bin) for bin in at_once) for at_once in zip(*bins, strict=True))
        if in_turn < fewest:
            fewest, best = in_turn, [[sorted(i for p in bin for i in cut[p]) for bin in replica] for replica in bins]
        if len(cut) == len(samples):
            return best
        parts *= 2


def _cut(samples: Sequence[Sample], members: list[int], parts: int, budget: int) -> Iterator[list[int]]:
    """Samples with one prompt in about ``parts`` parts of equal size, each within the budget or a single sample."""
    limit = min(budget, -(-_load(samples, members) // parts))
    part: list[int] = []
    before = len(samples[members[0]].prompt_tokens) - 1
    tokens, keys = before, 0  # of the part, as `_load` counts them
    for index in members:
        more, more_keys = len(samples[index].response_tokens), len(samples[index])
        if part and max(tokens + more, (keys + more_keys) // _KEYS) > limit:
            yield part
            part, tokens, keys = [], before, 0
        part.append(index)
        tokens, keys = tokens + more, keys + more_keys
    yield part


def _load(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """What samples with one prompt take of the budget: their packed tokens, or if that is more a `_KEYS`-th of the keys
    that they attend to."""
    tokens = len(samples[members[0]].prompt_tokens) - 1 + sum(len(samples[i].response_tokens) for i in members)
    return max(tokens, sum(len(samples[i]) for i in members) // _KEYS)


@dataclass(frozen=True)
class _Segment:
    """Consecutive input tokens of a sample: ``length`` of them from ``first`` on."""

    sample: Sample
    first: int
    length: int
    stem: int | None = None  # which segment has the tokens before ``first``


def _segments(samples: Sequence[Sample], share: bool) -> list[_Segment]:
    """One segment for each of the samples, which are sorted by length, then the stems that they need."""
    if not share:
        return [_Segment(sample, 0, len(sample)) for sample in samples]
    own: list[_Segment] = []
    stems: list[_Segment] = []
    places: dict[Any, int] = {}
    for sample in samples:
        before = len(sample.prompt_tokens) - 1
        if before and (key := _prompt_key(sample)) not in places:
            places[key] = len(samples) + len(stems)
            stems.append(_Segment(sample, 0, before))
        stem = places[key] if before else None
        own.append(_Segment(sample, before, len(sample.response_tokens), stem))
    return own + stems


def _prompt_key(sample: Sample) -> tuple[bytes, bytes | None]:
    """Equal for samples that can share a stem."""
    experts = sample.routed_experts
    before = len(sample.prompt_tokens) - 1
    return sample.prompt_tokens.tobytes(), None if experts is None else experts[:before].tobytes()


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    device: torch.device,
    tokens: int | None = None,
    shard: ContextShard | None = None,
    share: bool = False,
) -> MicroBatch:
    """Concatenate samples, sorted by length, without padding. indices: the samples' places in the optimizer batch.

    shard: each segment is padded to a multiple of the shard's number of chunks, and only this rank's chunks are kept.
    tokens: length of the packed axis over all context-parallel ranks; if it exceeds the samples' tokens, filler
    sequences without labels follow. share: whether each prompt is packed once, as the module's docstring tells.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    samples = [samples[i] for i in order]
    segments = _segments(samples, share)
    lengths = _padded_lengths(segments, shard)
    real = int(lengths.sum())
    filler = 0 if tokens is None else tokens - real
    runs = np.append(lengths, _filler_lengths(filler, int(lengths.max())))
    kept = shard.held_tokens(runs) if shard else np.arange(real + filler)
    columns = {name: x[kept] for name, x in _columns(segments, len(samples), lengths, filler).items()}
    trained = columns["is_response"].nonzero()[0]
    sizes = lengths[: len(samples)] // shard.size if shard else np.array([len(s.response_tokens) for s in samples])
    in_batch = slice(0, int(sizes.sum())) if shard else trained  # the tokens of the objective's batch
    mask = columns["loss_mask"][in_batch]

    tensor = partial(to_device, device)
    cu_seqlens = tensor(offsets(runs))
    return MicroBatch(
        tokens=tensor(columns["tokens"])[None],
        labels=tensor(columns["labels"])[None],
        positions=tensor(columns["positions"])[None],
        packed=PackedSequences(
            qkv_format="thd",
            # boundaries of whole padded segments: padding is at their ends, where no other token attends to it
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=int(runs.max()),
            max_seqlen_kv=int(runs.max()),
            length_runs=tuple((len(list(run)), int(length)) for length, run in groupby(runs)),
            trained=tensor(trained),
            shard=shard,
            attended=attended(_pieces(segments, runs, shard, device.type != "cuda"), len(kept), real + filler, device),
        ),
        batch=TokenBatch(
            logprobs=torch.full(mask.shape, torch.nan, device=device),
            rollout_logprobs=tensor(columns["rollout_logprobs"][in_batch]),
            advantages=tensor(columns["advantages"][in_batch]),
            loss_mask=tensor(mask),
            cu_seqlens=tensor(offsets(sizes)),
            sequence_index=tensor(np.array([indices[i] for i in order], np.int64)),
            shard=shard,
            with_prompts=shard is not None and not share,
        ),
        token_count=int(mask.sum()),
        sequence_count=sum(s.trained_tokens > 0 for s in samples) if shard is None or shard.rank == 0 else 0,
        routed_experts=_routed_experts(segments, lengths, filler, kept, device),
    )


def _filler_lengths(filler: int, longest: int) -> np.ndarray:
    """Of filler sequences, which are no longer than the longest segment, since that keeps their attention cheap."""
    return np.array([longest] * (filler // longest) + [filler % longest] * bool(filler % longest), np.int64)


def _pieces(
    segments: Sequence[_Segment], lengths: np.ndarray, shard: ContextShard | None, by_size: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places of queries and keys for `attended`, from the padded lengths of all segments, those of filler included.

    by_size: for devices without flash attention, sort the pieces by size, so that those of equal size may be one call;
    and let each response's queries begin with those of its stem, whose outputs are the same in every response, since a
    causal call with as many queries as keys needs no mask.
    """
    ends = np.cumsum(lengths)
    rows = (
        shard.gathered_tokens(lengths) if shard else [np.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)]
    )
    stems = [None if s.stem is None else rows[s.stem][: segments[s.stem].length] for s in segments]
    stems += [None] * (len(rows) - len(segments))
    whole = [own if stem is None else np.concatenate([stem, own]) for stem, own in zip(stems, rows, strict=True)]
    if shard:
        pieces = []
        for keys, length, end in zip(whole, lengths // shard.chunks, ends // shard.size, strict=True):
            for place, chunk in enumerate(shard.held):
                begin = end - (2 - place) * length
                later = (shard.chunks - 1 - chunk) * length
                pieces.append((np.arange(begin, begin + length), keys[: len(keys) - later]))
    elif by_size:
        used = {segment.stem for segment in segments}
        pieces = [(keys, keys) for place, keys in enumerate(whole) if place not in used]
    else:
        pieces = list(zip(rows, whole, strict=True))
    return sorted(pieces, key=lambda piece: [len(part) for part in piece]) if by_size else pieces


def _routed_experts(
    segments: Sequence[_Segment], lengths: np.ndarray, filler: int, kept: np.ndarray, device: torch.device
) -> dict[int, torch.Tensor] | None:
    """`MicroBatch.routed_experts` from the samples' records, -1 where there are none; None if no sample has one."""
    records = [s.sample.routed_experts for s in segments]
    kinds = {(record.shape[1:], record.dtype) for record in records if record is not None}
    if not kinds:
        return None
    ((shape, dtype),) = kinds
    experts = np.full((int(lengths.sum()) + filler, *shape), -1, dtype)
    for segment, record, start in zip(segments, records, np.cumsum(lengths) - lengths, strict=True):
        if record is not None:
            experts[start : start + segment.length] = record[segment.first : segment.first + segment.length]
    # as under sequence parallelism, a rank's routers see its own tokens
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    on_device = to_device(device, experts[kept].swapaxes(0, 1)).chunk(size, 1)[rank]
    return {layer + 1: chosen for layer, chosen in enumerate(on_device)}


def _padded_lengths(segments: Sequence[_Segment], shard: ContextShard | None) -> np.ndarray:
    chunks = shard.chunks if shard else 1
    return np.array([-(-segment.length // chunks) * chunks for segment in segments], np.int64)


def packed_length(samples: Sequence[Sample], multiple: int, shard: ContextShard | None, share: bool = False) -> int:
    """Length of the packed axis of a micro-batch over all context-parallel ranks: the smallest that holds the samples
    and gives each rank a multiple of ``multiple`` tokens."""
    chunks = shard.chunks if shard else 1
    real = int(_padded_lengths(_segments(samples, share), shard).sum())
    return -(-real // (multiple * chunks)) * multiple * chunks


def _columns(segments: Sequence[_Segment], samples: int, lengths: np.ndarray, filler: int) -> dict[str, np.ndarray]:
    """Per-token arrays over the whole packed axis, zero in the padding of segments and in the filler at the end.

    samples: how many segments, the first ones, end with a response; the others are stems, whose labels nobody reads.
    """
    total = int(lengths.sum()) + filler
    columns = {name: np.zeros(total, np.int64) for name in ("tokens", "labels", "positions")}
    columns |= {name: np.zeros(total, np.float32) for name in ("rollout_logprobs", "advantages")}
    columns |= {name: np.zeros(total, bool) for name in ("is_response", "loss_mask")}
    for number, (segment, start) in enumerate(zip(segments, np.cumsum(lengths) - lengths, strict=True)):
        sample, end = segment.sample, start + segment.length
        sequence = np.concatenate([sample.prompt_tokens, sample.response_tokens])[segment.first :]
        columns["tokens"][start:end] = sequence[: segment.length]
        columns["labels"][start:end] = sequence[1 : segment.length + 1]
        columns["positions"][start:end] = np.arange(segment.first, segment.first + segment.length)
        if number >= samples:
            continue
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


def _sharing_pays(samples: Sequence[Sample]) -> bool:
    """Whether enough tokens are those of a prompt that another sample has, too; less is not worth the gathered keys."""
    once = {_prompt_key(sample): len(sample.prompt_tokens) - 1 for sample in samples}
    every = sum(len(sample.prompt_tokens) - 1 for sample in samples)
    return every - sum(once.values()) >= _LEAST_SHARED * sum(map(len, samples))


def micro_batches(
    samples: Sequence[Sample], budget: int, device: torch.device, share: bool = False
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of an update; every rank gets the same number of them.

    budget: tokens of a micro-batch. share: whether a micro-batch may hold each prompt once, which needs
    `PolicyModel.shares_prompts`. Sequence parallelism needs T to be a multiple of its ranks. Virtual pipeline stages
    need all micro-batches equally long, and their number to be a multiple of the pipeline ranks.
    """
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size() is not None
    rounds = mpu.get_pipeline_model_parallel_world_size() if virtual else 1
    share = share and _sharing_pays(samples)
    bins = assign_groups(samples, replicas, budget, rounds, share)[replica]
    filler = replace(min(samples, key=len), trained=False)  # an empty bin still takes part in every collective
    parts = [[samples[i] for i in bin] or [filler] for bin in bins]
    shard, multiple = context_shard(), mpu.get_tensor_model_parallel_world_size()
    tokens = [packed_length(part, multiple, shard, share) for part in parts]
    if virtual:
        tokens = [max(tokens)] * len(parts)
    return [
        pack(part, bin or [len(samples)], device, length, shard, share)
        for part, bin, length in zip(parts, bins, tokens, strict=True)
    ]
