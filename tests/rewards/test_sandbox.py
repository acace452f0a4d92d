"""No hostile program reaches the host, keeps a CPU for ever, or gets a reward that it did not earn."""

import functools
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megarl.errors import UserError
from megarl.recipe.tables import RewardTable
from megarl.rewards import code, cpp, sandbox
from megarl.rewards.code import Code
from megarl.rewards.sandbox import SandboxError
from tests.rewards import attacks
from tests.rewards.pooling import prompt_for

# low limits, since a dozen programs run until the time limit ends them
TABLE = RewardTable(kind="code", seconds=1, memory_mb=256)
HANGING = {"naps", "daemon", "kill others", "right, then hang"}
SPINNING = {"deaf spin", "error flood", "exec chain"}
SEVERAL = {"output flood", "stack"}  # exceed several limits at about the same time, so any of them may be reported


def verifier(asleep=60.0, **settings):
    """asleep: limit in seconds; on a busy machine the start alone may take some."""
    code = Code(TABLE.model_copy(update=settings))
    code._limits = replace(code._limits, asleep=asleep, threads=32, disk=32 << 20, file_size=32 << 20)
    return code


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What a program must not reach: a file with a secret, and an abstract Unix socket.

    After the tests nobody may have connected, and the file must be unchanged.
    """
    secret = secrets.token_hex()
    file = tmp_path_factory.mktemp("host") / "secret"
    file.write_text(secret)
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{file}")
        abstract.listen()
        abstract.setblocking(False)
        yield {"host": str(file), "parent": os.getpid()}
        with pytest.raises(BlockingIOError):
            abstract.accept()
    assert file.read_text() == secret
    assert list(file.parent.iterdir()) == [file]


def question_for(host):
    secret = Path(host["host"]).read_text()
    return prompt_for(tests=[{"input": secret, "output": secret}] * 2)


def program(body, host):
    return "```python\n" + (attacks.PRELUDE + body).format(**host) + "\n```"


@pytest.fixture
def nothing_left():
    """Fails if a process that the test has started is left; processes that ran before the test do not count."""
    before = psutil.Process().children(recursive=True)
    yield
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


def test_an_attack_that_succeeds_would_get_the_reward(host):
    """The control of all attacks: what they do on success gives the reward. Threads and pairs of sockets work."""
    body = "thread = threading.Thread(target=won)\na, b = socket.socketpair()\na.send(b'x'); b.recv(1)\nthread.start()"
    assert verifier().score(question_for(host), program(body, host)).value == 1
    right = f"def answer(n): return {attacks.SECRET}"
    assert verifier().score(prompt_for(tests=attacks.ASSERTIONS), right).value == 1
    cpp = "#include <iostream>\nint main() { std::string s; std::cin >> s; std::cout << s; }"
    assert verifier(language="cpp").score(question_for(host), cpp).value == 1


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", attacks.PROGRAMS)
def test_a_hostile_program_scores_0_and_leaves_no_process(name, host):
    score = verifier(1.0 if name in HANGING else 60.0).score(question_for(host), program(attacks.PROGRAMS[name], host))
    assert score.value == 0
    expected = "asleep" if name in HANGING else "time" if name in SPINNING else None
    assert name in SEVERAL or score.over == expected


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", attacks.FORGED)
def test_assertions_cannot_be_forged(name):
    assert verifier(1.0).score(prompt_for(tests=attacks.ASSERTIONS), attacks.FORGED[name]).value == 0


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", attacks.CPP)
def test_hostile_cpp_scores_0_and_leaves_no_process(name, host, monkeypatch):
    monkeypatch.setattr(cpp, "COMPILING", replace(cpp.COMPILING, seconds=2, memory=1 << 30, disk=64 << 20))
    assert verifier(language="cpp").score(question_for(host), attacks.CPP[name].format(**host)).value == 0


@pytest.fixture(scope="module")
def readable_by_all():
    """(launcher, prefix of Python, megarl's programs for the sandbox): copies that every user may read; the originals
    may be in root's home."""
    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        os.chmod(folder, 0o755)
        launcher, prefix = Path(folder) / "launcher", Path(folder) / "python"
        shutil.copy2(sandbox.launcher(), launcher)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        home = Path(sys.base_prefix)
        (prefix / "bin").mkdir(parents=True)
        shutil.copy2((home / "bin" / version).resolve(), prefix / "bin" / version)
        unwanted = shutil.ignore_patterns("site-packages", "test", "idlelib", "lib2to3", "ensurepip", "config-*", "*.a")
        shutil.copytree(Path(os.__file__).parent, prefix / "lib" / version, ignore=unwanted)
        (prefix / "lib" / version / "site-packages").mkdir()
        for library in (home / "lib").glob("libpython*"):
            shutil.copy2(library, prefix / "lib")
        shutil.copytree(code.INSIDE, Path(folder) / "inside")
        yield launcher, prefix, Path(folder) / "inside"


def test_an_ordinary_user_has_the_same_sandbox(readable_by_all, host, monkeypatch):
    launcher, prefix, programs = readable_by_all
    monkeypatch.setattr(code, "INSIDE", programs)
    monkeypatch.setattr(sandbox, "launcher", lambda: launcher)
    monkeypatch.setattr(sandbox, "python_of", functools.partial(sandbox.python_of, prefix))
    right, cases = program("won()", host), {name: program(body, host) for name, body in attacks.PROGRAMS.items()}
    question = question_for(host)
    for slow in HANGING | SPINNING | SEVERAL:
        del cases[slow]

    def check():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(12345, 12345, 12345)
            os.setresuid(12345, 12345, 12345)
        assert verifier().score(question, right).value == 1
        assert [name for name, text in cases.items() if verifier().score(question, text).value] == []
        for text, value in ((f"def answer(n): return {attacks.SECRET}", 1), (attacks.FORGED["exit"], 0)):
            assert verifier().score(prompt_for(tests=attacks.ASSERTIONS), text).value == value

    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_sandbox_that_fails_is_an_error_and_gives_no_score(monkeypatch, host):
    """For pairs of input and output and for assertions. Before a run the error names a remedy."""
    monkeypatch.setattr(sandbox, "_tree", lambda: ({"/nowhere": "/usr"}, {}))
    with pytest.raises(SandboxError, match="stat /nowhere"):
        verifier().score(question_for(host), program("won()", host))
    with pytest.raises(SandboxError, match="stat /nowhere"):
        verifier().score(prompt_for(tests=attacks.ASSERTIONS), "def answer(n): return 1")
    sandbox.check_sandbox.cache_clear()
    with pytest.raises(UserError, match="cannot be run in a sandbox here .failed stat /nowhere.*never run without one"):
        sandbox.check_sandbox()


def test_a_program_whose_sandbox_is_killed_from_outside_is_run_again(host, monkeypatch):
    """It is run again only once; a second kill is an error."""
    slow, endless = (program(f"import time\ntime.sleep({seconds})\nwon()", host) for seconds in (0.2, 10_000))
    start = subprocess.Popen.__init__
    killed = []

    def killing(self, *arguments, **named):
        start(self, *arguments, **named)
        if len(killed) < most:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(subprocess.Popen, "__init__", killing)
    most = 1
    assert verifier().score(question_for(host), slow).value == 1
    most = 3
    with pytest.raises(SandboxError, match="launcher was killed from outside"):
        verifier().score(question_for(host), endless)
    assert len(killed) == 3


def test_nothing_outlives_a_launcher_that_is_killed():
    endless = sandbox.Program(sandbox.python_command("-c", "while True: pass"), {})
    with sandbox._sealed(b"") as nothing, sandbox.Run(endless, sandbox.Limits(seconds=1000), nothing) as running:
        launcher = psutil.Process(running._supervisor.pid)
        while len(children := launcher.children(recursive=True)) < 2:  # the program runs
            time.sleep(0.01)
        launcher.kill()
        assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize("test", ["all(map({}, [7]))", "[*filter({}, [7])] == []", "[*zip(map({}, [7]))] == []"])
def test_a_program_cannot_end_the_iterators_of_its_tests(test):
    tests = "assert " + test.format("lambda n: answer(n) == 4")
    assert verifier().score(prompt_for(tests=tests), "def answer(n): raise StopIteration").value == 0
