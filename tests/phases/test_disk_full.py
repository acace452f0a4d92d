"""A disk that is full at several points of a run: the error says so, and with more space the run continues."""

import os
import subprocess

import pytest

from tests.helpers import megarl, mount_tmpfs, wait_until_nobody_works_on

pytestmark = pytest.mark.crash


def sealed_of(run):
    """{file: contents} of the sealed rollouts."""
    stages = [seal.parent for seal in run.glob("stages/*/rollouts/SEALED")]
    return {path: path.read_bytes() for stage in stages for path in stage.iterdir() if path.name[0] != "."}


def test_a_full_disk_loses_no_sealed_rollouts(recipe, tmp_path):
    disk = tmp_path / "disk"
    run, ballast, messages = disk / "run", disk / "ballast", 0
    mount_tmpfs(disk, "size=40m")
    try:
        # each attempt has more room, so that the disk is full at a later point of the run
        for room in (200, 1500, 2600, 4500, 8000, 12000, 40000):
            free = os.statvfs(disk)
            ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - room * 1024)))
            sealed = sealed_of(run)
            result = megarl("train", recipe, "--run-dir", run, "--set", "eval.every=0")
            ballast.unlink()
            assert sealed_of(run).items() >= sealed.items()
            if result.returncode == 0:
                break
            assert "no space left" in result.stderr.lower(), result.stderr
            messages += 1
        assert result.returncode == 0 and messages >= 2
    finally:
        wait_until_nobody_works_on(run)
        subprocess.run(["umount", disk], check=True)
