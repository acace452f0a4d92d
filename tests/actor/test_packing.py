"""Packing: every token once, micro-batches within the budget, and equally many of them on every replica."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.recipe.megatron import token_alignment

pytestmark = pytest.mark.usefixtures("one_rank")


@settings(deadline=None)  # a case may take long on a busy machine
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    replicas=st.integers(1, 4),
    budget=st.integers(10, 200),
)
def test_assignment_has_every_sample_once_within_the_budget(lengths, replicas, budget):
    from megarl.actor.packing import assign

    bins = assign(lengths, replicas, budget)
    assert len(bins) == replicas
    assert len({len(part) for part in bins}) == 1
    assert sorted(i for part in bins for bin in part for i in bin) == list(range(len(lengths)))
    for part in bins:
        for bin in part:
            assert sum(lengths[i] for i in bin) <= budget or len(bin) == 1


def test_as_few_micro_batches_as_the_budget_allows():
    from megarl.actor.packing import assign

    assert assign([5, 5, 5, 5], 1, 20) == [[[0, 1, 2, 3]]]
    assert [len(part) for part in assign([5, 5, 5, 5], 1, 10)] == [2]
    assert assign([100, 5], 1, 10) == [[[0], [1]]]
    assert assign([7], 2, 10) == [[[0]], [[]]]  # a replica without samples still takes part


def test_pack_has_every_token_once_in_order():
    from megarl.actor.packing import Sample, pack

    samples = [
        Sample(np.array([10, 11]), np.array([20, 21, 22]), np.array([-1, -2, -3], np.float32), 0.5),
        Sample(np.array([12]), np.array([23]), np.array([-4], np.float32), -0.5, trained=False),
    ]
    masked = [replace(samples[0], loss_mask=np.array([True, False, True])), samples[1]]
    assert pack(masked, [7, 3], torch.device("cpu")).batch.loss_mask.tolist() == [False, True, False, True]
    assert [sample.trained_tokens for sample in (*masked, samples[0])] == [2, 0, 3]
    batch = pack(samples, [7, 3], torch.device("cpu"))
    assert batch.tokens.tolist() == [[12, 10, 11, 20, 21]]
    assert batch.labels.tolist() == [[23, 11, 20, 21, 22]]
    assert batch.positions.tolist() == [[0, 0, 1, 2, 3]]
    assert batch.packed.length_runs == ((1, 1), (1, 4))
    assert batch.packed.cu_seqlens_q.tolist() == [0, 1, 5]
    assert batch.packed.trained.tolist() == [0, 2, 3, 4]
    assert batch.batch.rollout_logprobs.tolist() == [-4, -1, -2, -3]
    assert batch.batch.advantages.tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert batch.batch.loss_mask.tolist() == [False, True, True, True]
    assert batch.batch.cu_seqlens.tolist() == [0, 1, 4]
    assert batch.batch.sequence_index.tolist() == [3, 7]
    assert (batch.token_count, batch.sequence_count) == (3, 1)
    assert batch.batch.logprobs.isnan().all() and batch.batch.logprobs.shape == (4,)  # the model has not run yet


def test_filler_reaches_the_length_and_has_no_labels():
    from megarl.actor.packing import Sample, pack

    samples = [Sample(np.array([10, 11]), np.array([20, 21]), np.zeros(2, np.float32), 1.0)]
    batch = pack(samples, [0], torch.device("cpu"), tokens=4)
    assert batch.tokens.tolist() == [[10, 11, 20, 0]]
    assert batch.packed.length_runs == ((1, 3), (1, 1))
    assert batch.packed.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.packed.trained.tolist() == [1, 2]
    assert batch.batch.cu_seqlens.tolist() == [0, 2]


def test_filler_sequences_are_no_longer_than_the_longest_sample():
    from megarl.actor.packing import Sample, pack

    samples = [Sample(np.array([10, 11]), np.array([20, 21]), np.zeros(2, np.float32), 1.0)]
    batch = pack(samples, [0], torch.device("cpu"), tokens=11)
    assert batch.packed.length_runs == ((3, 3), (1, 2))
    assert batch.token_count == int(batch.batch.loss_mask.sum()) == 2


def test_micro_batches_for_fp8_are_padded_to_its_alignment():
    from megarl.actor.packing import Sample, micro_batches

    samples = [Sample(np.array([10]), np.arange(20, 21 + n), np.zeros(n + 1, np.float32), 1.0) for n in (3, 9, 14, 30)]
    align = token_alignment({"fp8": "hybrid", "fp8_recipe": "mxfp8"})
    assert (align, token_alignment({"fp8": "e4m3"}), token_alignment({"fp8_recipe": "mxfp8"})) == (32, 16, 1)
    batches = micro_batches(samples, 40, torch.device("cpu"), align)
    assert [batch.tokens.size(1) for batch in batches] == [32, 32]
    assert sum(batch.token_count for batch in batches) == sum(len(sample.response_tokens) for sample in samples)


@settings(deadline=None)  # a case may take long on a busy machine
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    size=st.sampled_from([2, 4]),
    multiple=st.sampled_from([1, 2]),
    seed=st.integers(0, 100),
)
def test_context_shards_hold_every_token_once_at_its_place(lengths, size, multiple, seed):
    """All ranks' zigzag chunks together are the unsharded micro-batch."""
    from megarl.actor.packing import Sample, pack, packed_length
    from megarl.batch import ContextShard

    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        prompt = rng.integers(1, length + 1)
        response, logprobs = rng.integers(2, 99, length + 1 - prompt), rng.normal(size=length + 1 - prompt)
        experts = rng.integers(-1, 99, (length, 2, 3)).astype(np.int8) if index != 2 else None
        prompt_tokens, logprobs = rng.integers(2, 99, prompt), logprobs.astype(np.float32)
        mask = rng.random(len(response)) < 0.5 if index % 2 == 0 else None
        samples.append(Sample(prompt_tokens, response, logprobs, index, index != 1, experts, mask))
    device = torch.device("cpu")

    def experts_of(batch, token):
        return [expert for layer in (1, 2) for expert in batch.routed_experts[layer][token]]

    whole = pack(samples, range(len(samples)), device)
    order, found = whole.batch.sequence_index.tolist(), {}
    group = torch.distributed.group.WORLD
    for rank in range(size):
        shard = ContextShard(group, rank, size)
        part = pack(samples, range(len(samples)), device, packed_length(samples, multiple, shard), shard)
        assert part.tokens.size(1) % multiple == 0
        assert part.batch.sequence_index.tolist() == order
        assert part.token_count == int(part.batch.loss_mask.sum())
        tokens = part.batch.loss_mask.numel()
        places = part.batch.positions
        sequences = torch.repeat_interleave(torch.arange(len(samples)), part.batch.cu_seqlens.diff())
        for i in range(tokens):
            row = (
                part.tokens[0, i],
                part.labels[0, i],
                part.batch.rollout_logprobs[i],
                part.batch.advantages[i],
                part.batch.loss_mask[i],
                *experts_of(part, i),
            )
            found[int(sequences[i]), int(places[i])] = tuple(float(x) for x in row)
    starts = whole.packed.cu_seqlens_q.tolist()
    trained = set(whole.packed.trained.tolist())
    responses = iter(range(len(whole.batch.loss_mask)))
    for sequence in range(len(samples)):
        for place, i in enumerate(range(starts[sequence], starts[sequence + 1])):
            j = next(responses) if i in trained else None
            expected = [whole.tokens[0, i], whole.labels[0, i]]
            fields = (whole.batch.rollout_logprobs, whole.batch.advantages, whole.batch.loss_mask)
            expected += [0, 0, 0] if j is None else [field[j] for field in fields]
            sample = samples[whole.batch.sequence_index[sequence]]
            recorded = np.full((2, 3), -1) if sample.routed_experts is None else sample.routed_experts[place]
            assert [int(x) for x in experts_of(whole, i)] == recorded.reshape(-1).tolist()
            expected += recorded.reshape(-1).tolist()
            assert found.pop((sequence, place)) == tuple(float(x) for x in expected)
    assert all(row[4] == 0 and set(row[5:]) == {-1} for row in found.values())  # padding
