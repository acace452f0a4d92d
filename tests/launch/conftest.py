"""`slurm`: a private two-node Slurm for the session; `launch`: launch/slurm.py in the environment that has nemo-run."""

import json
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


# runs launch/slurm.py for every line of stdin, each time in a fork of this process: importing nemo-run takes seconds
FORKS = """
import json, os, runpy, sys
import nemo_run
for line in sys.stdin:
    *sys.argv, environment, output, errors = json.loads(line)
    if (child := os.fork()) == 0:
        os.environ.update(environment)
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def imported_launcher(launch_python, tmp_path_factory):
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path_factory.mktemp("nemo"))}
    environment.pop("PYTHONPATH", None)
    command, pipe = [str(launch_python), "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def launch(imported_launcher, tmp_path):
    """Run launch/slurm.py, with the Slurm that variables of the environment name, if any."""

    def run(*arguments, **environment):
        environment.pop("PYTHONPATH", None)
        outputs = tmp_path / "stdout", tmp_path / "stderr"
        order = ["launch/slurm.py", *map(str, arguments), environment, *map(str, outputs)]
        print(json.dumps(order), file=imported_launcher.stdin, flush=True)
        code = int(imported_launcher.stdout.readline())
        return subprocess.CompletedProcess(order, code, *(path.read_text() for path in outputs))

    return run
