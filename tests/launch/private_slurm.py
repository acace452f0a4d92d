"""A real Slurm of two nodes on this host: munged, slurmctld and two slurmd, as Debian packages them, all in one folder.

Neither systemd nor the system's own configuration is involved, and nothing but loopback.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.helpers import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin"
NODES = ("127.0.0.1", "127.0.0.2")  # names that the nodes' agents can resolve
CPUS = 8  # of each node, as Slurm is told: more than there are, so that jobs on both nodes fit

CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text()  # all else is Slurm's default

# nemo-run asks `sacct`, which needs Slurm's accounting database; of recent jobs the controller knows the same
SACCT = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -j ] && job=$2; shift; done
echo 'JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode'
field() { scontrol show job -o "$job" | grep -o " \\?$1=[^ ]*" | head -n1 | cut -d= -f2-; }
[ -n "$(field JobId)" ] && echo "$job|$(field JobName)|$(field Partition)|ci|1|$(field JobState)|$(field ExitCode)"
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]


class PrivateSlurm:
    """A context manager that runs the daemons. Commands with its ``environment``, and those of `run`, use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{root}/bin:{SEARCH_PATH}",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def run(self, *command: object, check: bool = True) -> str:
        result = subprocess.run(list(map(str, command)), env=self.environment, text=True, capture_output=True)
        if check and result.returncode:
            raise RuntimeError(f"{command}: {result.stdout}{result.stderr}")
        return result.stdout

    def job(self, job: str) -> dict[str, str]:
        """{name: value} of what ``scontrol show job`` prints about a job."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def __enter__(self) -> PrivateSlurm:
        self._configure()
        munge = self.root / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        try:
            self.run("munged", "--force", *(f"--{option}={munge}/{name}" for option, name in files.items()))
            self.run("slurmctld", "-c")
            for node in NODES:
                self.run("slurmd", "-N", node)
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _configure(self) -> None:
        for directory in ("munge", "state", "bin", *(f"spool-{node}" for node in NODES)):
            (self.root / directory).mkdir(parents=True)
        (self.root / "munge").chmod(0o700)
        key = self.root / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        text = CONFIGURATION.format(
            root=self.root,
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            ports=free_ports(3),
            nodes=NODES,
            node_list=",".join(NODES),
            cpus=CPUS,
        )
        (self.root / "slurm.conf").write_text(text)
        sacct = self.root / "bin/sacct"
        sacct.write_text(SACCT)
        sacct.chmod(0o755)

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + 120
        while len(self.run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N", check=False).split()) < 2:
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.root.glob("*.log"))
                raise RuntimeError(f"the private Slurm did not come up:\n{logs}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        """Stop exactly the daemons that were started, the controller first."""
        self.run("scancel", "--user", getpass.getuser(), "--signal=KILL", check=False)
        for path in (self.root / "slurmctld.pid", *self.root.glob("slurmd-*.pid"), self.root / "munge/pid"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                _stop(int(path.read_text()))


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        os.kill(pid, 0)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
