"""Stages on the Hugging Face Hub: pushed and pulled through huggingface_hub, against a local server of its API."""

import os
import subprocess
import sys

import pytest

from megarl.commands.stages.pack import pack
from megarl.commands.stages.packed import Source
from megarl.commands.stages.unpack import unpack
from tests.commands.stages.hub_server import TOKEN, serve
from tests.commands.stages.made_up import make_run
from tests.helpers import ROOT, mount_tmpfs

NAME = "me/frozen-rollouts"


@pytest.fixture(scope="module")
def packed(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    pack(make_run(recipe, folder / "run").root, 0, folder / "stage", "apache-2.0", weights=True, prompts=True)
    return folder / "stage"


@pytest.fixture
def hub(tmp_path):
    with serve() as (found, address):
        proxies = {name: "" for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")}
        found.environment = os.environ | proxies | {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN}
        found.environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        found.environment.pop("HF_HUB_OFFLINE", None)  # set if an earlier test started a phase from this process
        yield found


def stage(hub, *arguments):
    """Run `megarl stage` in a new interpreter, because huggingface_hub reads its environment when it is imported."""
    command = [sys.executable, "-m", "megarl.cli", "stage", *map(str, arguments)]
    return subprocess.run(
        command, env=hub.environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_stage_comes_back_as_it_was_pushed(packed, hub, tmp_path):
    pushed = stage(hub, "push", packed, NAME, "--private")
    assert pushed.returncode == 0, pushed.stderr
    assert (hub.repository, hub.private) == (NAME, True)
    files = {str(path.relative_to(packed)): path.read_bytes() for path in packed.rglob("*") if path.is_file()}
    assert hub.files == files
    hub.files["evil.py"] = b"import os"  # not in the manifest, so not downloaded
    pulled = stage(hub, "pull", NAME, tmp_path / "stage")
    assert pulled.returncode == 0, pulled.stderr
    assert hub.commit in pulled.stdout
    got = {
        str(p.relative_to(tmp_path / "stage")): p.read_bytes() for p in (tmp_path / "stage").rglob("*") if p.is_file()
    }
    assert got == files
    assert not any("evil.py" in line for line in hub.seen if "resolve" in line)
    unpack(tmp_path / "stage", tmp_path / "run", None, [])


def test_a_stage_that_was_changed_on_the_hub_is_refused(packed, hub, tmp_path):
    assert stage(hub, "push", packed, NAME).returncode == 0
    shard = next(name for name in hub.files if name.endswith(".arrow"))
    data = bytearray(hub.files[shard])
    data[len(data) // 2] ^= 1
    hub.files[shard] = bytes(data)
    pulled = stage(hub, "pull", NAME, tmp_path / "stage")
    assert pulled.returncode == 2
    assert f"{shard} does not match the checksum in its manifest" in pulled.stderr
    assert not (tmp_path / "stage").exists()
    hub.files["policy/config.json"] += b" " * 1000
    hub.seen.clear()
    pulled = stage(hub, "pull", NAME, tmp_path / "stage")
    assert (pulled.returncode, pulled.stderr.count("\n")) == (2, 1)
    assert "policy/config.json has" in pulled.stderr and "but its manifest says" in pulled.stderr
    assert {line.rpartition("/")[2] for line in hub.seen if "resolve" in line} == {"manifest.json"}
    hub.files["manifest.json"] += b" " * (16 << 20)
    hub.seen.clear()
    pulled = stage(hub, "pull", NAME, tmp_path / "stage")
    assert pulled.returncode == 2 and not any("resolve" in line for line in hub.seen)
    hub.files["manifest.json"] = b"{}"
    pulled = stage(hub, "pull", NAME, tmp_path / "stage")
    assert (pulled.returncode, pulled.stderr.count("\n")) == (2, 1)


def test_a_full_disk_is_reported(packed, hub, tmp_path):
    assert stage(hub, "push", packed, NAME).returncode == 0
    mount_tmpfs(tmp_path / "small", f"size={Source(packed).manifest.bytes + (4 << 20)}")
    try:
        hub.files["README.md"] = b" " * (12 << 20)  # which the manifest does not include
        pulled = stage(hub, "pull", NAME, tmp_path / "small/stage")
        assert pulled.returncode == 2
        assert "no space left while writing" in pulled.stderr.splitlines()[-1]  # below huggingface_hub's progress
        assert not (tmp_path / "small/stage").exists()
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


def test_a_mistake_gives_one_line_of_error(packed, hub, tmp_path):
    attempts = {
        "no such repository": stage(hub, "pull", "me/other", tmp_path / "a"),
        "no name": stage(hub, "pull", "not a name", tmp_path / "a"),
        "not a stage": stage(hub, "push", tmp_path, NAME),
    }
    hub.environment["HF_TOKEN"] = "hf_wrong"
    attempts["not allowed"] = stage(hub, "push", packed, NAME)
    for what, result in attempts.items():
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), (what, result.stderr)
    hub.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    unreachable = stage(hub, "pull", NAME, tmp_path / "a")
    assert unreachable.returncode == 1 and "cannot be reached" in unreachable.stderr


def test_a_tar_file_is_not_pushed(packed, hub, tmp_path):
    from megarl.commands.stages.packed import write_tar

    write_tar(packed, Source(packed).manifest, tmp_path / "stage.tar")
    refused = stage(hub, "push", tmp_path / "stage.tar", NAME)
    assert refused.returncode == 2 and "as a directory" in refused.stderr
    assert hub.seen == []
