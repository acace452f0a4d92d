"""`slurm`: a private two-node Slurm for the session; `launch`: launch/slurm.py in the environment that has nemo-run."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.launch.private_slurm import PACKAGES, PrivateSlurm, missing_programs

LAUNCH_PYTHON = Path(os.environ.get("MEGARL_LAUNCH_PYTHON") or ROOT / ".venv-launch/bin/python")


def unavailable(why):
    if os.environ.get("MEGARL_REQUIRE_SLURM") == "1":
        pytest.fail(f"MEGARL_REQUIRE_SLURM=1, but {why}")
    pytest.skip(why)


@pytest.fixture(scope="session")
def launch_python():
    if not LAUNCH_PYTHON.exists():
        unavailable(f"there is no nemo-run: {LAUNCH_PYTHON} does not exist; tools/setup_venv.py makes it")
    return LAUNCH_PYTHON


@pytest.fixture(scope="session")
def slurm(launch_python):
    if missing := missing_programs():
        unavailable(f"{', '.join(missing)} not found: apt-get install {PACKAGES}")
    # not under pytest's folder: a socket's path may have at most 107 characters
    with tempfile.TemporaryDirectory(prefix="megarl-slurm-") as root, PrivateSlurm(Path(root)) as slurm:
        yield slurm


@pytest.fixture
def launch(launch_python, tmp_path):
    """Run launch/slurm.py, by default without any Slurm; nemo-run keeps its experiments in the test's folder."""

    def run(*arguments, environment=None, timeout=600):
        environment = {**(environment or os.environ), "NEMORUN_HOME": str(tmp_path / "nemo")}
        environment.pop("PYTHONPATH", None)
        command = [str(launch_python), "launch/slurm.py", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)

    return run
