"""No process of a server outlives the process that started it, whichever of them is killed."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megarl.rollout.sglang import guard

# a server with a child and a grandchild in sessions of their own; all three ignore the signals that stop a run
SERVER = """
import signal, subprocess, sys, time
if sys.argv[1] != "0":
    subprocess.Popen([sys.executable, "-c", {source!r}, str(int(sys.argv[1]) - 1)], start_new_session=True)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print(sys.argv[1], flush=True)
time.sleep(600)
"""
CLIENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, {guard!r}, str(os.getpid()), sys.executable, "-c", {server!r}, "2"])
time.sleep(600)
"""


@pytest.fixture
def tree():
    """[client, its guard, the server, the server's child, its grandchild]."""
    source = SERVER.format(source=SERVER.format(source=SERVER.format(source="")))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT.format(guard=guard.__file__, server=source)], stdout=subprocess.PIPE, text=True
    )
    assert {client.stdout.readline() for _ in range(3)} == {"0\n", "1\n", "2\n"}
    processes = [psutil.Process(client.pid), *psutil.Process(client.pid).children(recursive=True)]
    assert len(processes) == 5
    yield processes
    for process in processes:
        if process.is_running():
            process.kill()


def wait_until_ended(processes):
    deadline = time.monotonic() + 120
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


@pytest.mark.parametrize("asked", [True, False])
def test_the_guard_and_all_descendants_end_with_the_server_or_when_it_is_asked(tree, asked):
    """The guard ignores signals that stop a run."""
    client, guarded, server, *_ = tree
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        guarded.send_signal(number)
    guarded.send_signal(guard.END) if asked else server.kill()
    wait_until_ended(tree[1:])
    assert client.is_running()


def test_all_processes_end_with_the_client_and_so_do_orphans_of_the_server(tree):
    client, _, _, middle, last = tree
    middle.kill()
    wait_until_ended([middle])
    assert last.is_running()
    client.kill()
    wait_until_ended(tree)


def test_the_server_ends_with_its_guard(tree):
    _, guarded, server, *_ = tree
    guarded.kill()
    wait_until_ended([server])


def test_the_guard_exits_with_the_code_of_its_command_and_without_a_client_starts_nothing(tmp_path):
    def code(client, source):
        command = [sys.executable, guard.__file__, str(client), sys.executable, "-c", source]
        return subprocess.run(command).returncode

    assert code(os.getpid(), "raise SystemExit(3)") == 3
    assert code(os.getpid(), "import os; os.kill(os.getpid(), 9)") == 128 + 9
    assert code(os.getpid(), "import signal; raise SystemExit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))") == 0
    assert code(1, f"open('{tmp_path}/started', 'w')") == 1 and not (tmp_path / "started").exists()
