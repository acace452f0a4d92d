"""Packing: every token once, micro-batches within the budget, and equally many of them on every replica."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.actor.packing import Sample, assign, assign_groups, pack, packed_length
from megarl.batch import ContextShard
from megarl.recipe.megatron import shares_prompts

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def test_as_few_micro_batches_as_the_budget_allows():
    assert assign([5, 5, 5, 5], 1, 20) == [[[0, 1, 2, 3]]]
    assert [len(part) for part in assign([5, 5, 5, 5], 1, 10)] == [2]
    assert assign([100, 5], 1, 10) == [[[0], [1]]]
    assert assign([7], 2, 10) == [[[0]], [[]]]  # a replica without samples still takes part


def test_pack_has_every_token_once_in_order():
    samples = [
        Sample(np.array([10, 11]), np.array([20, 21, 22]), np.array([-1, -2, -3], np.float32), 0.5),
        Sample(np.array([12]), np.array([23]), np.array([-4], np.float32), -0.5, trained=False),
    ]
    masked = [replace(samples[0], loss_mask=np.array([True, False, True])), samples[1]]
    assert pack(masked, [7, 3], CPU).batch.loss_mask.tolist() == [False, True, False, True]
    assert [sample.trained_tokens for sample in (*masked, samples[0])] == [2, 0, 3]
    batch = pack(samples, [7, 3], CPU)
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


def group(prompt, *responses, **fields):
    return [
        Sample(np.array(prompt), np.array(r), np.arange(len(r), dtype=np.float32), float(len(r)), **fields)
        for r in responses
    ]


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    responses=st.integers(1, 8),
    replicas=st.integers(1, 4),
    budget=st.integers(20, 300),
    seed=st.integers(0, 100),
)
def test_groups_are_assigned_within_the_budget_and_never_cost_more_than_single_samples(
    prompts, responses, replicas, budget, seed
):
    rng = np.random.default_rng(seed)
    samples = [
        sample
        for i, n in enumerate(prompts)
        for sample in group(np.full(n, i), *(np.zeros(rng.integers(1, 20)) for _ in range(responses)))
    ]

    def in_turn(share, assigned):
        bins = assign_groups(samples, replicas, budget, 1, share=assigned)
        assert len(bins) == replicas
        assert sorted(i for replica in bins for bin in replica for i in bin) == list(range(len(samples)))
        sizes = [[packed_length([samples[i] for i in bin], 1, None, share) for bin in replica] for replica in bins]
        for replica, lengths in zip(bins, sizes, strict=True):
            assert all(size <= budget or len(bin) == 1 for bin, size in zip(replica, lengths, strict=True))
        return sum(max(at_once) for at_once in zip(*sizes, strict=True))

    assert in_turn(True, True) <= in_turn(False, False)


def test_a_micro_batch_attends_to_four_times_as_many_keys_as_it_may_have_tokens():
    """A layer gathers a copy of them for each response."""
    samples = group([7] * 101, *[[1]] * 64)
    (bins,) = assign_groups(samples, 1, 200, 1, share=True)  # the group has 164 tokens, and 6464 keys
    assert all(101 * len(bin) <= 4 * 200 for bin in bins) and len(bins) == 10


def test_a_group_stays_together_unless_replicas_would_be_idle():
    samples = [s for n in range(4) for s in group([n] * 50, [1] * 10, [2] * 10)]
    whole = [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert assign_groups(samples, 1, 70, 1, share=True) == whole
    assert sorted(assign_groups(samples, 4, 1000, 1, share=True)) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    alone = assign_groups(samples, 8, 1000, 1, share=True)
    assert sorted(i for ((i,),) in alone) == list(range(8))
    # one replica would compute two groups of 69 tokens; of single samples, with 59, each computes at most three
    assert max(sum(map(len, part)) for part in assign_groups(samples, 3, 1000, 1, share=True)) == 4


def test_prompts_are_shared_only_where_nothing_depends_on_their_number():
    fixed_bias = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    assert all(map(shares_prompts, ({}, fixed_bias)))
    for settings in (
        {"linear_attention_freq": [1, 0]},
        {"moe_router_enable_expert_bias": True},  # Megatron's default rate changes it
        {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-4},
    ):
        assert not shares_prompts(settings), settings


def test_filler_reaches_the_length_in_sequences_no_longer_than_the_longest_sample():
    samples = group([10, 11], [20, 21])
    batch = pack(samples, [0], CPU, tokens=4)
    assert batch.tokens.tolist() == [[10, 11, 20, 0]]
    assert batch.packed.length_runs == ((1, 3), (1, 1))
    assert batch.packed.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.packed.trained.tolist() == [1, 2]
    assert batch.batch.cu_seqlens.tolist() == [0, 2]
    batch = pack(samples, [0], CPU, tokens=11)
    assert batch.packed.length_runs == ((3, 3), (1, 2))
    assert batch.token_count == int(batch.batch.loss_mask.sum()) == 2


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    size=st.sampled_from([2, 4]),
    seed=st.integers(0, 100),
)
def test_context_shards_hold_every_token_once_at_its_place(lengths, size, seed):
    rng, samples = np.random.default_rng(seed), []
    for index, length in enumerate(lengths):
        prompt = rng.integers(1, length + 1)
        (sample,) = group(rng.integers(2, 99, prompt), rng.integers(2, 99, length + 1 - prompt), trained=index != 1)
        experts = rng.integers(-1, 99, (length, 2, 3)).astype(np.int8) if index != 2 else None
        mask = rng.random(length + 1 - prompt) < 0.5 if index % 2 == 0 else None
        samples.append(replace(sample, routed_experts=experts, loss_mask=mask))
    found = {}
    for rank in range(size):
        shard = ContextShard(torch.distributed.group.WORLD, rank, size)
        part = pack(samples, range(len(samples)), CPU, packed_length(samples, 2, shard), shard)
        batch = part.batch
        assert part.tokens.size(1) % 2 == 0 and part.token_count == int(batch.loss_mask.sum())
        for i, (sequence, place) in enumerate(zip(batch.sequence_ids, batch.positions, strict=True)):
            row = (part.tokens[0, i], part.labels[0, i], batch.rollout_logprobs[i], batch.advantages[i])
            row = [*map(float, row), bool(batch.loss_mask[i]), *torch.cat([part.routed_experts[n][i] for n in (1, 2)])]
            found[int(batch.sequence_index[sequence]), int(place)] = row
    for index, sample in enumerate(samples):
        tokens, prompt = np.concatenate([sample.prompt_tokens, sample.response_tokens]), len(sample.prompt_tokens)
        for place in range(len(sample)):
            values, experts = [0.0, 0.0, False], [-1] * 6
            if (n := place + 1 - prompt) >= 0:
                trains = sample.trained and (sample.loss_mask is None or sample.loss_mask[n])
                values = [sample.rollout_logprobs[n], sample.advantage, trains]
            if sample.routed_experts is not None:
                experts = sample.routed_experts[place].flatten().tolist()
            assert found.pop((index, place)) == [*tokens[place : place + 2], *values, *experts]
    assert not any(row[4] for row in found.values())  # padding
