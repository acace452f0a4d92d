"""Damage on disk: what a crash can leave is repaired; anything else is reported and left unchanged."""

import shutil

import pytest

from megarl.errors import UserError
from megarl.storage.rollouts import RolloutStore, RolloutWriter, seal
from tests.storage.sample_rollouts import POLICY, as_bytes, contents, make_group, with_experts


@pytest.fixture
def stage(tmp_path):
    """A directory of three shards with two groups each; most bytes of the second shard are routed experts."""
    directory = tmp_path / "rollouts"
    with RolloutWriter(directory, **POLICY) as writer:
        for start, of_chunk in ((0, make_group), (2, lambda i: with_experts(make_group(i), (48, 8))), (4, make_group)):
            writer.append([of_chunk(start), of_chunk(start + 1)])
    return directory


def lines(stage):
    return (stage / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def test_an_incomplete_last_ledger_line_is_dropped_with_its_shard(stage, tmp_path):
    first, second, third = lines(stage)
    whole = contents(stage)
    for last in (third.replace(b"w00000", b"w00009"), *(third[:cut] for cut in range(len(third)))):
        (stage / "ledger.jsonl").write_bytes(first + second + last)
        assert RolloutStore(stage).group_ids == [0, 1, 2, 3]
    with RolloutWriter(stage, **POLICY) as writer:
        assert (stage / "ledger.jsonl").read_bytes() == first + second
        assert len(list(stage.glob("*.arrow"))) == 2
        writer.append([make_group(4), make_group(5)])
    assert contents(stage) == whole


def test_leftovers_are_removed_by_their_own_writer_and_by_sealing(stage):
    leftovers = ["w00000_00000009.arrow", ".w00000_00000009.arrow.tmp", "w00003_00000011.arrow"]
    for name in leftovers:
        (stage / name).write_bytes(b"half")
    RolloutWriter(stage, **POLICY).close()
    assert [name for name in leftovers if (stage / name).exists()] == leftovers[2:]  # writer 3 may still be running
    seal(stage, range(6))
    assert len(list(stage.iterdir())) == 3 + 2


def test_a_damaged_ledger_line_is_named_and_nothing_is_deleted(stage):
    first, second, third = lines(stage)
    (stage / "ledger.jsonl").write_bytes(first + second.replace(b'"responses": 8', b'"responses": 9') + third)
    before = contents(stage)
    for attempt in (lambda: RolloutStore(stage), lambda: RolloutWriter(stage, **POLICY), lambda: seal(stage, range(6))):
        with pytest.raises(UserError, match=r"ledger.jsonl, line 2 is damaged.*delete that line"):
            attempt()
    assert contents(stage) == before
    (stage / "ledger.jsonl").write_bytes(first + third)  # the remedy
    with RolloutWriter(stage, **POLICY) as writer:
        writer.append([make_group(i) for i in RolloutStore(stage).missing(range(6))])
    seal(stage, range(6))
    assert [as_bytes(g) for g in RolloutStore(stage).read(range(6))] == [as_bytes(make_group(i)) for i in range(6)]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_damaged_or_missing_shard_is_named_only_when_it_is_read(stage, sealed):
    if sealed:
        seal(stage, range(6))
    path = stage / "w00000_00000002.arrow"
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)
    before = contents(stage)
    store = RolloutStore(stage)
    assert as_bytes(store.read([5])[0]) == as_bytes(make_group(5))
    remedy = "delete SEALED, " if sealed else "delete the shard"
    with pytest.raises(UserError, match=rf"{path.name} does not match the checksum.*{remedy}"):
        store.read([5, 3])
    path.write_bytes(payload[:-8])
    with pytest.raises(UserError, match=f"{path.name} has {len(payload) - 8} bytes, not {len(payload)}"):
        store.read([3])
    path.unlink()
    for attempt in (store.read, *([] if sealed else [lambda _: seal(stage, range(6))])):
        with pytest.raises(UserError, match=f"{path.name} is gone"):
            attempt([3])
    assert contents(stage) == {name: data for name, data in before.items() if name != path.name}


def test_a_sealed_ledger_that_was_truncated_or_edited_is_refused(stage):
    seal(stage, range(6))
    first, second, third = lines(stage)
    for ledger in (first + second, first + second + third[:-1], first + third + second, b""):
        (stage / "ledger.jsonl").write_bytes(ledger)
        with pytest.raises(UserError, match="truncated or edited after sealing"):
            RolloutStore(stage)
    (stage / "ledger.jsonl").unlink()
    with pytest.raises(UserError, match="truncated or edited after sealing"):
        seal(stage, range(6))


def test_a_damaged_seal_is_named_and_can_be_made_again(stage):
    seal(stage, range(6))
    path = stage / "SEALED"
    mark = path.read_bytes()
    for data in (b"", b"[]", b"{}", bytes(16), mark[:10], mark.replace(b'"groups": 6', b'"groups": 7')):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"SEALED is damaged: .* delete it and start again"):
            RolloutStore(stage)
    path.unlink()
    seal(stage, range(6))
    assert path.read_bytes() == mark


def test_a_group_in_two_shards_is_named(stage, tmp_path):
    with RolloutWriter(tmp_path / "elsewhere", **POLICY, writer=1) as writer:
        writer.append([make_group(3)])
    shutil.copytree(tmp_path / "elsewhere", stage, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"group 3 in .* is both in w00001_00000003.arrow and in w00000_00000002.arrow"):
        RolloutStore(stage)
