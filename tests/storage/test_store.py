"""The rollout store returns groups bit for bit, at a cost that does not depend on the rest of the stage."""

import dataclasses
import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.errors import UserError
from megarl.storage.rollouts import OPEN_SHARDS, Group, Response, RolloutStore, RolloutWriter, is_sealed, seal
from tests.storage.sample_rollouts import POLICY, as_bytes, contents, make_group, with_experts


def write(directory, *chunks, writer=0, **policy):
    with RolloutWriter(directory, **(POLICY | policy), writer=writer) as rollouts:
        for chunk in chunks:
            rollouts.append([make_group(i) for i in chunk])


def read_arrow(path):
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def test_groups_of_extreme_values_come_back_bit_for_bit(tmp_path):
    tokens, logprobs = np.array([0, 2**31 - 1], np.int32), np.array([-(2.0**100), -0.0], np.float32)
    low, high = Response(tokens, logprobs, -1e6, "stop", 0), Response(tokens[1:], logprobs[1:], 1e6, "length", 2**40)
    groups = [Group(10**9, tokens[1:], (low, high)), Group(0, tokens, (high,)), make_group(7)]
    with RolloutWriter(tmp_path, **POLICY) as writer:
        writer.append(groups)
    back = RolloutStore(tmp_path).read([group.group_id for group in groups])
    assert [as_bytes(group) for group in back] == [as_bytes(group) for group in groups]


def test_a_store_reports_its_groups_missing_groups_and_entries(tmp_path):
    write(tmp_path, [5, 4], [0, 1])
    store = RolloutStore(tmp_path)
    assert store.group_ids == [0, 1, 4, 5]
    assert store.missing(range(7)) == [2, 3, 6]
    assert [group.group_id for group in store.read([4, 0, 5])] == [4, 0, 5]
    assert [entry.groups for entry in store.entries] == [(0, 1), (4, 5)]
    rows = [response for i in (4, 5) for response in make_group(i).responses]
    entry = store.entries[1]
    assert (entry.responses, entry.tokens) == (8, sum(len(row.tokens) for row in rows))
    assert entry.reward_sum == pytest.approx(sum(row.reward for row in rows), rel=1e-12)
    assert entry.bytes == (tmp_path / entry.shard).stat().st_size
    with pytest.raises(UserError, match="group 3 is not in"):
        store.read([3])


def test_the_file_on_disk_is_plain_arrow_with_the_documented_columns(tmp_path):
    write(tmp_path, [0, 1])
    table = read_arrow(next(tmp_path.glob("*.arrow")))
    tokens = ["prompt_tokens", "response_tokens", "rollout_logprobs"]
    policy = ["policy_version", "logprob_mode", "weights_hash"]
    assert table.column_names == ["group_id", "sample", *tokens, "reward", "finish_reason", *policy]
    assert table.schema.field("rollout_logprobs").type == pa.list_(pa.float32())
    assert table["group_id"].to_pylist() == [0] * 4 + [1] * 4
    assert table["sample"].to_pylist() == [0, 1, 2, 3] * 2
    assert set(table["weights_hash"].to_pylist()) == {POLICY["weights_hash"]}
    assert table["rollout_logprobs"][5].as_py() == make_group(1).responses[1].rollout_logprobs.tolist()


def test_reading_keeps_few_shards_mapped(tmp_path):
    shards = OPEN_SHARDS + 8
    write(tmp_path, *[[i] for i in range(shards)])
    store = RolloutStore(tmp_path)
    for i in range(shards):
        store.read([i])
    gc.collect()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}
    assert len(mapped) == OPEN_SHARDS
    views = store.read([0])[0]  # memory-mapped without copies, and nobody can change a sealed stage through it
    with pytest.raises(ValueError, match="read-only"):
        views.responses[0].rollout_logprobs[0] = 0.0


def test_sealing_merges_the_ledgers_of_several_writers_and_may_be_repeated(tmp_path):
    write(tmp_path, [4, 5], writer=2)
    write(tmp_path, [0, 1])
    write(tmp_path, [2, 3], [6, 7], writer=1)
    assert len(list(tmp_path.glob("ledger*"))) == 3
    before = RolloutStore(tmp_path)
    assert not is_sealed(tmp_path)
    seal(tmp_path, range(8))
    assert is_sealed(tmp_path)
    assert [path.name for path in tmp_path.glob("ledger*")] == ["ledger.jsonl"]
    after = RolloutStore(tmp_path)
    assert after.entries == before.entries
    assert [entry.groups[0] for entry in after.entries] == [0, 2, 4, 6]
    assert [as_bytes(group) for group in after.read(range(8))] == [as_bytes(make_group(i)) for i in range(8)]
    sealed = contents(tmp_path)
    seal(tmp_path, range(8))
    for number in (0, 1):
        with pytest.raises(UserError, match="no rollouts can be added to a sealed stage"):
            RolloutWriter(tmp_path, **POLICY, writer=number)
    assert contents(tmp_path) == sealed
    with pytest.raises(UserError, match="absent does not exist: run the rollout phase"):
        seal(tmp_path / "absent", range(4))


def test_seal_requires_the_expected_groups_and_records_the_chosen_ones(tmp_path):
    write(tmp_path, [0, 1], [3, 5])
    assert RolloutStore(tmp_path).chosen == [0, 1, 3, 5]
    with pytest.raises(UserError, match=r"lacks 1 of 2 groups \(the first is 2\)"):
        seal(tmp_path, range(6), [1, 2])
    with pytest.raises(UserError, match="1 groups outside"):
        seal(tmp_path, range(5), [1, 3])
    assert not is_sealed(tmp_path)
    seal(tmp_path, range(6), [1, 3])
    sealed = RolloutStore(tmp_path)
    assert (sealed.chosen, sealed.group_ids) == ([1, 3], [0, 1, 3, 5])
    assert as_bytes(*sealed.read([5])) == as_bytes(make_group(5))


def test_a_second_writer_with_the_same_number_is_refused(tmp_path):
    with RolloutWriter(tmp_path, **POLICY) as writer:
        writer.append([make_group(0)])
        RolloutStore(tmp_path)  # a reader that closes its own handle of the ledger must not release the lock
        with pytest.raises(UserError, match="another process is writing"):
            RolloutWriter(tmp_path, **POLICY)
        with pytest.raises(UserError, match="another process is writing"):
            seal(tmp_path, range(1))
        RolloutWriter(tmp_path, **POLICY, writer=1).close()
    RolloutWriter(tmp_path, **POLICY).close()


def test_a_group_is_written_once_and_a_stage_has_one_behaviour_policy(tmp_path):
    with RolloutWriter(tmp_path, **POLICY) as writer:
        writer.append([make_group(3)])
        for repeated in ((4, 3), (5, 5)):
            with pytest.raises(UserError, match=f"group {repeated[1]} is already in"):
                writer.append([make_group(i) for i in repeated])
        writer.append([make_group(4)])
    for other in ({"weights_hash": "ff"}, {"logprob_mode": "raw"}):
        with pytest.raises(UserError, match="a stage has one behaviour policy"):
            RolloutWriter(tmp_path, **(POLICY | other), writer=1)
    assert RolloutStore(tmp_path).group_ids == [3, 4]


def test_routed_experts_come_back_bit_for_bit_without_copies(tmp_path):
    recorded = [with_experts(make_group(0), (3, 2), np.int8), with_experts(make_group(1), (1, 1), np.int16)]
    recorded.append(with_experts(make_group(2, longest=100), (64, 1024)))
    with RolloutWriter(tmp_path, **POLICY) as writer:
        for group in (*recorded, make_group(9)):
            writer.append([group])
    store = RolloutStore(tmp_path)
    assert [as_bytes(group) for group in store.read([0, 1, 9])] == [as_bytes(g) for g in (*recorded[:2], make_group(9))]
    table = read_arrow(tmp_path / store.entries[0].shard)
    assert table.schema.field("routed_experts").type == pa.list_(pa.list_(pa.list_(pa.int8(), 2), 3))
    assert table["routed_experts"][1].as_py() == recorded[0].responses[1].routed_experts.tolist()
    store.verify(store.entries[2])
    tracemalloc.start()
    try:
        arrow = pa.total_allocated_bytes()
        (read,) = store.read([2])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(response.routed_experts.nbytes for response in recorded[2].responses)
    assert peak + pa.total_allocated_bytes() - arrow < size / 8
    assert as_bytes(read) == as_bytes(recorded[2])


GOOD, RECORDED = make_group(7), with_experts(make_group(7))
ONE, EXPERTS = GOOD.responses[1], RECORDED.responses[1].routed_experts
BAD_RESPONSES = (
    ({"tokens": ONE.tokens[:0], "rollout_logprobs": ONE.rollout_logprobs[:0]}, "at least one token"),
    ({"tokens": ONE.tokens - 40}, "is negative"),
    ({"rollout_logprobs": ONE.rollout_logprobs[:-1]}, "float32 .* like its tokens"),
    ({"rollout_logprobs": np.full_like(ONE.rollout_logprobs, np.nan)}, "finite and <= 0"),
    ({"rollout_logprobs": -ONE.rollout_logprobs}, "finite and <= 0"),
    ({"reward": 1e308}, "reward is 1e.308, expected a finite number of at most 1,000,000"),
    ({"finish_reason": "eos"}, "finish_reason is 'eos'"),
)
BAD_EXPERTS = (
    (EXPERTS[1:], r"routed_experts must be int8 or int16 \[.*, layers, top_k\]"),
    (EXPERTS.astype(np.int16), "differ in dtype or shape"),
    (None, "differ in dtype or shape"),
    (EXPERTS - np.int8(2), "-[23] in routed_experts is neither an expert nor -1"),
)


def test_a_bad_response_is_named_and_nothing_is_written(tmp_path):
    cases = [(GOOD, *case) for case in BAD_RESPONSES]
    cases += [(RECORDED, {"routed_experts": experts}, message) for experts, message in BAD_EXPERTS]
    with RolloutWriter(tmp_path, **POLICY) as writer:
        for good, change, message in cases:
            rows = (good.responses[0], dataclasses.replace(good.responses[1], **change))
            with pytest.raises(UserError, match=f"group 7, response 1.*{message}"):
                writer.append([dataclasses.replace(good, group_id=6), dataclasses.replace(good, responses=rows)])
        with pytest.raises(UserError, match="group 7 has no responses"):
            writer.append([dataclasses.replace(GOOD, responses=())])
        with pytest.raises(UserError, match="group 7, prompt_tokens must be int32 .* with at least one token"):
            writer.append([dataclasses.replace(GOOD, prompt_tokens=GOOD.prompt_tokens[:0])])
    assert list(contents(tmp_path)) == ["ledger.jsonl"]
