"""SIGKILL and full disks at every point: acknowledged groups survive, and a stage ends as an undisturbed one."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess

import pytest

from megarl.errors import UserError
from megarl.storage.rollouts import RolloutStore, RolloutWriter, is_sealed, seal
from tests.helpers import mount_tmpfs
from tests.storage.sample_rollouts import POLICY, as_bytes, contents, make_group, write_stage, write_stage_dying_at

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pytest", "pyarrow", "megarl.storage.rollouts"])


def check_acknowledged(directory, acknowledged, chunk):
    """The store has exactly the chunks whose append returned, or one more if the kill came just before the return."""
    starts = [int(line) for line in acknowledged.read_text().split()] if acknowledged.exists() else []
    known = {i for start in starts for i in range(start, start + chunk)}
    present = set(RolloutStore(directory).group_ids) if directory.exists() else set()
    assert known <= present
    assert len(present - known) in (0, chunk)
    if present - known:  # acknowledge it, since the next writer will not write it again
        with open(acknowledged, "a") as file:
            file.write(f"{min(present - known)}\n")


def test_a_stage_survives_a_kill_at_every_system_call(tmp_path):
    write_stage(tmp_path / "undisturbed", 6, 2)
    undisturbed = contents(tmp_path / "undisturbed")
    for call in range(1000):
        directory, acknowledged = tmp_path / f"{call}", tmp_path / f"{call}.txt"
        writer = processes.Process(target=write_stage_dying_at, args=(call, directory, 6, 2, acknowledged))
        writer.start()
        writer.join()
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
        check_acknowledged(directory, acknowledged, 2)
        write_stage(directory, 6, 2)
        assert contents(directory) == undisturbed
    assert call > 20  # 3 appends of 5 calls each, recovery and sealing: the kills reached the end of the stage
    assert contents(directory) == undisturbed


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB and 200 inodes."""
    mount = tmp_path / "disk"
    mount_tmpfs(mount, "size=1m,nr_inodes=200")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def leave_free(disk, blocks):
    """Fill the disk up to ``blocks`` free blocks; returns the file to delete."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail - blocks
    ballast.write_bytes(bytes(free * os.statvfs(disk).f_frsize))
    return ballast


def test_full_disk_at_every_point_of_an_append(small_disk):
    directory, present, messages, torn = small_disk / "rollouts", [0, 1], [], 0
    with RolloutWriter(directory, **POLICY) as writer:
        writer.append([make_group(0), make_group(1)])
        # enough lines that some cross the end of a disk block, where the full disk cuts them in two
        for group in range(2, 62):
            shards = len(list(directory.glob("*.arrow")))
            ledger = (directory / "ledger.jsonl").read_bytes()
            ballast = leave_free(small_disk, blocks=group % 3)
            try:
                writer.append([make_group(group, responses=1)])
            except UserError as error:
                messages.append(str(error))
                torn += len(list(directory.glob("*.arrow"))) > shards
                assert (directory / "ledger.jsonl").read_bytes() == ledger
                assert not list(directory.glob(".*"))
                ballast.unlink()
                writer.append([make_group(group, responses=1)])  # the same writer continues once there is room
            ballast.unlink(missing_ok=True)
            present.append(group)
            assert RolloutStore(directory).group_ids == present
    assert len(messages) > 10
    assert all("no space left while writing" in m and "start the same command again" in m for m in messages)
    assert torn > 0  # some shards were complete but had no room for their ledger line
    stored = RolloutStore(directory).read(range(2, 62))
    assert list(map(as_bytes, stored)) == [as_bytes(make_group(i, responses=1)) for i in range(2, 62)]


def test_full_disk_while_sealing_or_starting(small_disk):
    directory, groups = small_disk / "rollouts", list(map(make_group, range(30)))
    with RolloutWriter(directory, **POLICY) as writer:
        for group in groups:
            writer.append([group])
    for blocks in range(4):
        ballast = leave_free(small_disk, blocks)
        with pytest.raises(UserError, match="no space left"):
            seal(directory, range(30))
        assert not is_sealed(directory)
        assert RolloutStore(directory).missing(range(30)) == []
        ballast.unlink()
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (small_disk / f"{number}").touch()  # use up the inodes
    with pytest.raises(UserError, match="no space left"):
        RolloutWriter(small_disk / "another", **POLICY)
    for name in ("0", "1"):  # of the ledger and of SEALED
        (small_disk / name).unlink()
    seal(directory, range(30))
    assert [as_bytes(g) for g in RolloutStore(directory).read(range(30))] == list(map(as_bytes, groups))
