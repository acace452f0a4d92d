"""No process of an ended phase is left before the next start: neither workers of its engine nor the engine's server."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from megarl.errors import PhaseFailed
from megarl.workers import processes
from megarl.workers.processes import end_sessions

WAITS = "import os, time; os.write(1, b'up\\n'); time.sleep(600)"
# like the guard that ends an engine's server, which may take a while
GUARD = "import os, signal; signal.pthread_sigmask(0, {10}); os.write(1, b'up\\n'); signal.sigwait({10})"
# a phase process with a worker in its process group, and with a guard in a group of its own
PHASE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
subprocess.Popen([sys.executable, "-c", sys.argv[2]], process_group=0)
time.sleep(600)
"""


@pytest.fixture
def phase():
    """(leader, worker, guard) of a phase whose leader was killed."""
    command = [sys.executable, "-c", PHASE, WAITS, GUARD]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert [leader.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    children = psutil.Process(leader.pid).children()
    worker, guard = sorted(children, key=lambda process: GUARD in process.cmdline())
    leader.kill()
    leader.wait()
    yield leader, worker, guard
    for process in filter(alive, (worker, guard)):
        process.kill()


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_workers_are_killed_and_the_end_of_the_servers_guard_is_waited_for(phase):
    leader, worker, guard = phase
    end_sessions([os.getpid()])  # this process leads no session
    assert alive(worker) and alive(guard)
    ending = threading.Thread(target=end_sessions, args=([leader.pid],))
    ending.start()
    psutil.wait_procs([worker], timeout=60)
    ending.join(0.2)
    assert ending.is_alive() and alive(guard) and not alive(worker)
    guard.send_signal(signal.SIGUSR1)
    ending.join(60)
    assert not ending.is_alive() and not alive(guard)


def test_a_process_that_does_not_end_raises_phase_failed(phase, monkeypatch):
    leader, worker, guard = phase
    worker.kill()  # it may take longer to end than the time that this test gives both
    psutil.wait_procs([worker], timeout=60)
    monkeypatch.setattr(processes, "SESSION_SECONDS", 0.2)
    with pytest.raises(PhaseFailed, match=rf"processes \[{guard.pid}\] of an ended phase still run"):
        end_sessions([leader.pid])
