"""Responses of one update -> packed micro-batches by token budget, the same on every rank without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from megarl.actor.attention import PackedSequences


@dataclass(frozen=True)
class Sample:
    """One response with its prompt, on the host."""

    prompt_tokens: np.ndarray  # [P] int32
    response_tokens: np.ndarray  # [R] int32
    rollout_logprobs: np.ndarray  # [R] float32
    advantage: float
    trained: bool = True  # False: kept in the batch, but none of its tokens counts

    def __len__(self) -> int:
        # the last token is only a label, never an input
        return len(self.prompt_tokens) + len(self.response_tokens) - 1


@dataclass(frozen=True)
class MicroBatch:
    """T packed input tokens for the model, and N <= T trained labels (response tokens) for the objective.

    The objective sees the N trained labels alone, packed anew: prompt tokens would only be masked out again.
    """

    tokens: torch.Tensor  # [1, T] int64
    labels: torch.Tensor  # [1, T] int64, the token after each input
    positions: torch.Tensor  # [1, T] int64
    packed: PackedSequences
    rollout_logprobs: torch.Tensor  # [N] float32
    advantages: torch.Tensor  # [N] float32
    loss_mask: torch.Tensor  # [N] bool
    cu_seqlens: torch.Tensor  # [S + 1] int32, over the N labels
    sequence_index: torch.Tensor  # [S] int64, place of each sequence in the optimizer batch
    token_count: int  # labels under loss_mask
    sequence_count: int  # sequences with at least one of them
    old_logprobs: torch.Tensor | None = None  # [N] float32, behaviour policy recomputed by the actor
    ref_logprobs: torch.Tensor | None = None  # [N] float32, reference policy


def assign(lengths: Sequence[int], replicas: int, budget: int) -> list[list[list[int]]]:
    """Sample indices as [replica][micro-batch][...], every replica with the same number of micro-batches.

    Longest first onto the emptiest bin; as few micro-batches as keep every bin within ``budget`` tokens. A sample
    longer than the budget gets a bin of its own. Bins may stay empty when there are fewer samples than replicas.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    alone = sum(length > budget for length in lengths)
    shared = -(-sum(length for length in lengths if length <= budget) // budget)
    per_replica = -(-(alone + shared) // replicas)
    while True:
        bins: list[list[int]] = [[] for _ in range(replicas * per_replica)]
        load = [0] * len(bins)
        for index in order:
            target = min(range(len(bins)), key=load.__getitem__)
            bins[target].append(index)
            load[target] += lengths[index]
        if all(size <= budget or len(bin) == 1 for size, bin in zip(load, bins, strict=True)):
            return [[sorted(bin) for bin in bins[r::replicas]] for r in range(replicas)]
        per_replica += 1


def pack(samples: Sequence[Sample], indices: Sequence[int], device: torch.device, multiple: int = 1) -> MicroBatch:
    """Concatenate samples, sorted by length, without padding; ``indices``: their places in the optimizer batch.

    Sequence parallelism wants T to be a ``multiple`` of its ranks: fewer than that many tokens then follow as a
    sequence that nothing is computed from.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    samples = [samples[i] for i in order]
    lengths = np.array([len(s) for s in samples])
    responses = np.array([len(s.response_tokens) for s in samples])
    inputs, labels, positions, trained = [], [], [], []
    for sample, offset in zip(samples, np.cumsum(lengths) - lengths, strict=True):
        sequence = np.concatenate([sample.prompt_tokens, sample.response_tokens]).astype(np.int64)
        inputs.append(sequence[:-1])
        labels.append(sequence[1:])
        positions.append(np.arange(len(sample)))
        trained.append(offset + np.arange(len(sample) - len(sample.response_tokens), len(sample)))
    filler = -int(lengths.sum()) % multiple
    lengths = np.append(lengths, [filler] if filler else []).astype(np.int64)
    for part in (inputs, labels, positions):
        part.append(np.zeros(filler, np.int64))
    mask = np.repeat([s.trained for s in samples], responses)

    def tensor(parts: list[np.ndarray] | np.ndarray) -> torch.Tensor:
        array = parts if isinstance(parts, np.ndarray) else np.concatenate(parts)
        return torch.from_numpy(array).to(device, non_blocking=True)

    def offsets(sizes: np.ndarray) -> torch.Tensor:
        return tensor(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

    cu_seqlens = offsets(lengths)
    return MicroBatch(
        tokens=tensor(inputs)[None],
        labels=tensor(labels)[None],
        positions=tensor(positions)[None],
        packed=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_kv=int(lengths.max()),
            length_runs=tuple((len(list(run)), int(length)) for length, run in groupby(lengths)),
            trained=tensor(trained),
        ),
        rollout_logprobs=tensor([s.rollout_logprobs for s in samples]),
        advantages=tensor(np.repeat(np.array([s.advantage for s in samples], np.float32), responses)),
        loss_mask=tensor(mask),
        cu_seqlens=offsets(responses),
        sequence_index=tensor(np.array([indices[i] for i in order], np.int64)),
        token_count=int(mask.sum()),
        sequence_count=sum(s.trained for s in samples),
    )


def micro_batches(samples: Sequence[Sample], budget: int, device: torch.device) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of an update; every rank gets equally many."""
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    bins = assign([len(s) for s in samples], replicas, budget)[replica]
    multiple = mpu.get_tensor_model_parallel_world_size()
    filler = replace(min(samples, key=len), trained=False)  # an empty bin still takes part in every collective
    return [pack([samples[i] for i in bin] or [filler], bin or [len(samples)], device, multiple) for bin in bins]
