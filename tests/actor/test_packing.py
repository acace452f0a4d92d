"""Packing: nothing lost, nothing padded, budgets kept, every replica equally many micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_rank")


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    replicas=st.integers(1, 4),
    budget=st.integers(10, 200),
)
def test_assignment(lengths, replicas, budget):
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
    assert assign([7], 2, 10) == [[[0]], [[]]]  # a replica without work still takes part


def test_pack_has_every_token_once_in_order():
    from megarl.actor.packing import Sample, pack

    samples = [
        Sample(np.array([10, 11]), np.array([20, 21, 22]), np.array([-1, -2, -3], np.float32), 0.5),
        Sample(np.array([12]), np.array([23]), np.array([-4], np.float32), -0.5, trained=False),
    ]
    batch = pack(samples, [7, 3], torch.device("cpu"))
    assert batch.tokens.tolist() == [[12, 10, 11, 20, 21]]
    assert batch.labels.tolist() == [[23, 11, 20, 21, 22]]
    assert batch.positions.tolist() == [[0, 0, 1, 2, 3]]
    assert batch.packed.length_runs == ((1, 1), (1, 4))
    assert batch.packed.cu_seqlens_q.tolist() == [0, 1, 5]
    assert batch.packed.trained.tolist() == [0, 2, 3, 4]
    assert batch.rollout_logprobs.tolist() == [-4, -1, -2, -3]
    assert batch.advantages.tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert batch.loss_mask.tolist() == [False, True, True, True]
    assert batch.cu_seqlens.tolist() == [0, 1, 4]
    assert batch.sequence_index.tolist() == [3, 7]
    assert (batch.token_count, batch.sequence_count) == (3, 1)


def test_a_multiple_is_reached_with_tokens_that_no_label_comes_from():
    from megarl.actor.packing import Sample, pack

    samples = [Sample(np.array([10, 11]), np.array([20, 21]), np.zeros(2, np.float32), 1.0)]
    batch = pack(samples, [0], torch.device("cpu"), multiple=4)
    assert batch.tokens.tolist() == [[10, 11, 20, 0]]
    assert batch.packed.length_runs == ((1, 3), (1, 1))
    assert batch.packed.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.packed.trained.tolist() == [1, 2]
    assert batch.cu_seqlens.tolist() == [0, 2]
