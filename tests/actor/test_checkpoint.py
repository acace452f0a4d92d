"""A run resumes bit for bit from a checkpoint; a damaged one is detected, and code planted in one never runs."""

import errno
import io
import math
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megarl.actor import checkpoint, parallel, writers
from megarl.actor.optimizer_state import rectangles
from megarl.errors import PhaseFailed, UserError
from tests.actor.conftest import make_recipe
from tests.actor.layout_ranks import join
from tests.actor.ranks import run_ranks
from tests.actor.test_step import build, updates

pytestmark = pytest.mark.usefixtures("one_rank")


def weights(actor):
    return [p.detach().clone() for model in actor.models for p in model.parameters()]


@pytest.mark.parametrize(("family", "decoupled"), [("qwen3_moe", True), ("qwen3_tied", False)])
def test_resume_is_bitwise(family, decoupled, saved_model, tmp_path):
    adam = {"megatron_optimizer": {"decoupled_weight_decay": decoupled}}  # torch's AdamW, or its Adam
    straight = build(saved_model(family), **adam)
    for update in range(3):  # the third checkpoint takes the plan of the first two
        assert straight.saving.strategy.validated_cache_reuse is (update == 2)
        updates(straight, [update])
        checkpoint.save(straight, tmp_path / "checkpoints", update + 1, keep=1)
    expected = updates(straight, range(3, 6))

    resumed = build(saved_model(family), **adam)
    (found,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert checkpoint.load(resumed, found[1]) == 3 == found[0]
    assert updates(resumed, range(3, 6)) == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))


def test_the_writer_has_a_copy_that_training_does_not_change(saved_model, tmp_path, monkeypatch):
    training = threading.Event()

    def held(saving, *arguments):
        assert training.wait(60)
        write(saving, *arguments)

    actor, write = build(saved_model("qwen3")), writers.Saving._write
    updates(actor, [0])
    monkeypatch.setattr(writers.Saving, "_write", held)
    before = weights(actor)
    path = checkpoint.save(actor, tmp_path / "checkpoints", 1, keep=2, wait=False)
    expected = updates(actor, [1])
    training.set()
    checkpoint.finish(actor)

    resumed = build(saved_model("qwen3"))
    assert checkpoint.load(resumed, path) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(resumed), strict=True))
    assert updates(resumed, [1]) == expected


@pytest.fixture(scope="module")
def saved(saved_model, tmp_path_factory):
    """An actor after two updates, and the path of its checkpoint."""
    actor = build(saved_model("qwen3"))
    updates(actor, range(2))
    return actor, checkpoint.save(actor, tmp_path_factory.mktemp("saved") / "checkpoints", 2, keep=2)


def test_a_missing_file_is_named(saved):
    _, path = saved
    assert checkpoint.verify(path) is None
    for file in path.iterdir():
        data = file.read_bytes()
        file.unlink()
        assert file.name in (checkpoint.verify(path) or "")
        file.write_bytes(data)
    assert checkpoint.verify(path) is None


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_an_error_that_may_pass_is_no_damage(saved, name, monkeypatch):
    """As of a file server that is away for a moment: the checkpoint must not be set aside."""
    right = Path.read_bytes

    def fails(path):
        if path.name == name:
            raise OSError(errno.ESTALE, "Stale file handle")
        return right(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    monkeypatch.setattr("megarl.storage.checkpoints.file_sha256", fails)
    with pytest.raises(PhaseFailed, match=f"cannot read .*{name}: Stale file handle. Start the same command again"):
        checkpoint.verify(saved[1])


def save_of_two(rank, model, folder):
    """One of two ranks: rank 1 has no space for its part of a checkpoint, and both must say so.

    torch's writer raises a misleading RuntimeError on top of the error; ``fail`` does so too.
    """
    join(rank, 2, folder)
    parallel.build_groups(make_recipe(model))

    def fail(*arguments, **options):
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    if rank == 1:
        writers._write_item = fail
    with pytest.raises(UserError, match="no space left while writing .*update_000003"):
        checkpoint.save(build(model), folder / "checkpoints", 3, keep=2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.layouts
def test_every_rank_reports_why_one_rank_could_not_write(saved_model, tmp_path):
    run_ranks(save_of_two, (saved_model("qwen3"), tmp_path), 2)
    assert not list((tmp_path / "checkpoints").glob("update_*"))


class Payload:
    """Creates the directory ``marker`` when it is unpickled, as an attacker's pickle may run anything."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_planted_pickle_does_not_run(saved, tmp_path, monkeypatch):
    """Checksums do not prevent this: whoever plants a pickle can write a manifest that fits it."""
    actor, path = saved
    marker, file = tmp_path / "ran", path / ".metadata"
    before = file.read_bytes()
    metadata = pickle.loads(before)  # an entry of this type makes torch unpickle its bytes
    metadata.state_dict_metadata["a.pickle"] = BytesStorageMetadata()
    for planted in (Payload(marker), metadata):
        file.write_bytes(pickle.dumps(planted))
        with pytest.raises(UserError, match=r"update_000002 contains a type .* was not loaded"):
            checkpoint.load(actor, path)
    file.write_bytes(before)
    assert checkpoint.load(actor, path) == 2
    monkeypatch.setattr(checkpoint, "adam_step", lambda _: Payload(marker))  # among what ranks have in common
    path = checkpoint.save(actor, tmp_path / "checkpoints", 3, keep=2)
    with pytest.raises(UserError, match=f"{path} contains a type .* was not loaded"):
        checkpoint.load(actor, path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()  # it would have run


def test_a_pickle_in_the_place_of_what_ranks_have_in_common_is_not_read(saved, tmp_path):
    """Megatron-Core 0.19 writes one among the tensors, and unpickles it if there is no common.pt."""
    actor, path = saved
    path = Path(shutil.copytree(path, tmp_path / "update_000002"))
    torch.save(Payload(tmp_path / "ran"), planted := io.BytesIO())
    tensors = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(tensors + planted.getvalue())
    metadata, name = pickle.loads((path / ".metadata").read_bytes()), "common_state/shard_0_1"
    place = _StorageInfo("__0_0.distcp", len(tensors), len(planted.getvalue()))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(name)] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert checkpoint.load(actor, path) == 2
    (path / "common.pt").unlink()
    with pytest.raises(UserError, match=r"common\.pt is missing: remove .*update_000002 to"):
        checkpoint.load(actor, path)
    assert not (tmp_path / "ran").exists()


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_rectangles_cover_a_range_once_and_in_order(data, shape):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    flat, found = torch.arange(size).view(shape), rectangles(start, end, tuple(shape))
    values = [flat[tuple(slice(o, o + n) for o, n in zip(*r, strict=True))].flatten() for r in found]
    assert torch.cat([flat.new_zeros(0), *values]).tolist() == list(range(start, end))
    assert len(found) <= 2 * len(shape) - 1
