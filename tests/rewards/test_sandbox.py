"""No program gets what it wants: neither the host, nor a processor for ever, nor a reward that it did not earn."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megarl.data.prompts import Prompt
from megarl.errors import UserError
from megarl.recipe.tables import RewardTable
from megarl.rewards import cpp, sandbox
from megarl.rewards.code import Code
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rewards.sandbox import SandboxError
from tests.rewards import attacks

# limits of which that of time is met a dozen times
TABLE = RewardTable(kind="code", seconds=1, memory_mb=256)
HANGING = {"sleep", "naps", "deadlock", "daemon", "kill the parent", "kill all", "stop the guard", "right, then hang"}
SPINNING = {"spin", "deaf spin", "spinning threads", "backtracking", "error flood", "exec chain"}
SEVERAL = {"output flood", "stack"}  # limits are met at about the same time


def verifier(asleep=10.0, **settings):
    """asleep: seconds; on a busy machine even starting may take one."""
    code = Code(TABLE.model_copy(update=settings))
    code._limits = replace(code._limits, asleep=asleep, threads=32, disk=32 << 20, file_size=32 << 20)
    return code


def row(**columns):
    return Prompt(0, "?", (1,), "", {"metadata": columns})


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What a program must not reach: a file with a secret, a port and two sockets; a row asks for the secret."""
    secret = secrets.token_hex()
    file = tmp_path_factory.mktemp("host") / "secret"
    file.write_text(secret)
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{file}")
        abstract.listen()
        abstract.setblocking(False)
        port.setblocking(False)
        yield {"host": str(file), "port": port.getsockname()[1], "parent": os.getpid()}
        for listener in (port, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert file.read_text() == secret
    assert list(file.parent.iterdir()) == [file]


def asked(host):
    secret = Path(host["host"]).read_text()
    return row(tests=[{"input": secret, "output": secret}] * 2)


def program(body, host):
    return "```python\n" + (attacks.PRELUDE + body).format(**host) + "\n```"


@pytest.fixture
def nothing_left():
    """Of the processes that a test starts; what fixtures of other modules keep running is not its."""
    before = psutil.Process().children(recursive=True)
    yield
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


def test_there_are_more_than_forty():
    assert len(attacks.PROGRAMS) + len(attacks.FORGED) + len(attacks.CPP) >= 100


def test_what_wins_is_right(host):
    """The control of all attacks: what they do when they win gives the reward. Threads and pairs of sockets work."""
    body = "thread = threading.Thread(target=won)\na, b = socket.socketpair()\na.send(b'x'); b.recv(1)\nthread.start()"
    assert verifier().score(asked(host), program(body, host)).value == 1
    right = f"def answer(n): return {attacks.SECRET}"
    assert verifier().score(row(tests=attacks.ASSERTIONS), right).value == 1
    cpp = "#include <iostream>\nint main() { std::string s; std::cin >> s; std::cout << s; }"
    assert verifier(language="cpp").score(asked(host), cpp).value == 1


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", attacks.PROGRAMS)
def test_a_hostile_program_is_wrong_and_alone(name, host):
    score = verifier(1.0 if name in HANGING else 10.0).score(asked(host), program(attacks.PROGRAMS[name], host))
    assert score.value == 0
    expected = "asleep" if name in HANGING else "time" if name in SPINNING else None
    assert name in SEVERAL or score.over == expected


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", attacks.FORGED)
def test_assertions_cannot_be_forged(name):
    assert verifier(1.0).score(row(tests=attacks.ASSERTIONS), attacks.FORGED[name]).value == 0


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", attacks.CPP)
def test_hostile_cpp_is_wrong_and_alone(name, host, monkeypatch):

    monkeypatch.setattr(cpp, "COMPILING", replace(cpp.COMPILING, seconds=2, memory=1 << 30, disk=64 << 20))
    assert verifier(language="cpp").score(asked(host), attacks.CPP[name].format(**host)).value == 0


def as_ordinary_user(check, *arguments):
    """Call ``check`` in a fork that has left root, if it was; whether it raised nothing."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(12345, 12345, 12345)
                os.setresuid(12345, 12345, 12345)
            check(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(scope="module")
def everybodys():
    """The launcher and Python where every user may read them: here they may be in root's home."""
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
        yield launcher, prefix


@pytest.mark.parametrize("wrap", [None, shutil.which("bwrap") or "missing"], ids=["own", "bubblewrap"])
def test_an_ordinary_user_has_the_same_sandbox(everybodys, host, wrap, monkeypatch):
    """With namespaces of its own, and with bubblewrap's."""
    if wrap == "missing":
        assert os.environ.get("MEGARL_REQUIRE_BUBBLEWRAP") != "1", "bubblewrap is not installed"
        pytest.skip("needs bubblewrap")
    launcher, prefix = everybodys
    monkeypatch.setattr(sandbox, "launcher", lambda: launcher)
    monkeypatch.setattr(sandbox, "_python", lambda: sandbox.python_of(prefix))
    monkeypatch.setattr(shutil, "which", lambda name: wrap)
    right, cases = program("won()", host), {name: program(body, host) for name, body in attacks.PROGRAMS.items()}
    question = asked(host)
    for slow in HANGING | SPINNING | SEVERAL:
        del cases[slow]

    def check():
        sandbox.bubblewrap.cache_clear()
        assert os.geteuid() == 0 or sandbox.bubblewrap() == wrap
        assert verifier().score(question, right).value == 1
        assert [name for name, text in cases.items() if verifier().score(question, text).value] == []
        for text, value in ((f"def answer(n): return {attacks.SECRET}", 1), (attacks.FORGED["exit"], 0)):
            assert verifier().score(row(tests=attacks.ASSERTIONS), text).value == value

    assert as_ordinary_user(check)


def test_a_sandbox_that_fails_is_no_score(monkeypatch, host):
    """Neither for a pair of input and output, nor for assertions; and before a run, it is a mistake with a remedy."""
    monkeypatch.setattr(sandbox, "_tree", lambda: ({"/nowhere": "/usr"}, {}))
    with pytest.raises(SandboxError, match="stat /nowhere"):
        verifier().score(asked(host), program("won()", host))
    with pytest.raises(SandboxError, match="stat /nowhere"):
        verifier().score(row(tests=attacks.ASSERTIONS), "def answer(n): return 1")
    sandbox.check_sandbox.cache_clear()
    with pytest.raises(
        UserError, match=r"cannot be run in a sandbox here .failed stat /nowhere.*never run without one"
    ):
        sandbox.check_sandbox()


def test_a_sandbox_that_is_killed_from_outside_is_tried_again(host):
    """Once: what is killed twice is an error."""
    slow = program("import time\ntime.sleep(2)\nwon()", host)  # it has not ended when it is killed
    judge = verifier()
    judge._limits = replace(judge._limits, asleep=60.0)
    kill = subprocess.Popen.__init__
    killed = []

    def killing(self, *arguments, **named):
        kill(self, *arguments, **named)
        if len(killed) < most:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", killing)
        most = 1
        assert judge.score(asked(host), slow).value == 1
        most = 3
        with pytest.raises(SandboxError, match="launcher was killed from outside"):
            judge.score(asked(host), slow)
    assert len(killed) == 3


def test_hostile_programs_change_no_others_reward(host):
    """Through the pool: beside programs that hang, eat and fork, every right one is right and every wrong one wrong."""
    right, wrong = program("won()", host), program("print(1)", host)
    hostile = [program(attacks.PROGRAMS[name], host) for name in ("fork bomb", "memory", "sleep", "spin", "disk")]
    texts = [text for bad in hostile for text in (right, bad, wrong)]
    pool = VerifierPool(lambda: verifier(4.0), Limits(workers=2))
    try:
        numbers, found = [pool.ask(asked(host), text) for text in texts], {}
        while len(found) < len(numbers):
            found |= dict(pool.verdicts(wait=True))
    finally:
        pool.close()
    assert [found[number].score for number in numbers] == [1, 0, 0] * 5
    assert [found[number].over for number in numbers[1::3]] == [None, None, "asleep", "time", None]


def test_names_that_the_tests_use_are_not_the_programs():
    tests = "assert all(answer(n) == 5 for n in (7,))\nassert isinstance(answer(7), int) and math.isclose(answer(7), 5)"
    assert verifier().score(row(tests=tests), attacks.FORGED["names of the tests"]).value == 0
    assert verifier().score(row(tests=tests), "def answer(n): return 5").value == 1
