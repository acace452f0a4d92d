"""A disk that is full at several points of a run: the error says so, and with more space the run continues."""

import os
import subprocess

import pytest

from tests.helpers import megarl, mount_tmpfs, wait_until_nobody_works_on

pytestmark = pytest.mark.crash


def test_a_full_disk_loses_no_sealed_rollouts(recipe, tmp_path):
    disk = tmp_path / "disk"
    mount_tmpfs(disk, "size=40m")
    try:
        run = disk / "run"
        ballast = disk / "ballast"
        messages = 0
        # each attempt has more room, so that the disk is full at a later point of the run
        for room in (200, 1500, 2600, 4500, 8000, 12000, 40000):
            free = os.statvfs(disk)
            keep = free.f_bavail * free.f_frsize - room * 1024
            if keep > 0:
                ballast.write_bytes(bytes(keep))
            sealed = snapshot(run)
            result = megarl("train", recipe, "--run-dir", run, "--set", "eval.every=0")
            ballast.unlink(missing_ok=True)
            assert snapshot(run).items() >= sealed.items()
            if result.returncode == 0:
                break
            assert "no space left" in result.stderr.lower(), result.stderr
            messages += 1
        assert result.returncode == 0
        assert messages >= 2
    finally:
        wait_until_nobody_works_on(run)
        subprocess.run(["umount", disk], check=True)


def snapshot(run):
    return {
        str(p): p.read_bytes()
        for sealed in run.glob("stages/*/rollouts/SEALED")
        for p in sealed.parent.iterdir()
        if not p.name.startswith(".")
    }
