"""Helpers of tests in several folders: the root of the repository, the command line, a tiny recipe, reading a run."""

import contextlib
import ctypes
import io
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from megarl.phases.preload import SERVER_NAME

ROOT = Path(__file__).parents[1]
SGLANG_PYTHON = ROOT / "tests/rollout/sglang/python"  # the interpreter of .venv-sglang

RECIPE = (ROOT / "tests/recipe.toml").read_text()


def megarl(*arguments, timeout=900, **options):
    """Run `megarl` in a fork of a process that has imported it (zygote.py), and wait until it has ended."""
    command = start_megarl(*arguments, **options)
    command.wait(timeout)
    return subprocess.CompletedProcess(arguments, command.returncode, command.stdout, command.stderr)


def start_megarl(*arguments, env=None, hold=None, mutant=None, cwd=ROOT):
    """Start `megarl` in such a fork without waiting for it; returns a `tests.zygote.Command`.

    hold: the arguments of `tests.zygote.hold`. mutant: the name of a function of `tests.phases.mutants`.
    """
    from tests.zygote import Command

    environment = dict(os.environ if env is None else env)
    return Command(arguments, environment=environment, hold=hold, mutant=mutant, cwd=str(cwd))


def refused(*arguments):
    from megarl.cli import main

    with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()) as told:
        main(list(map(str, arguments)))
    assert end.value.code == 2
    return told.getvalue()


def free_ports(count):
    """Ports for servers that are started later: the kernel gives them to no other process that asks for any port.

    They follow each other.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.SystemRandom().randrange(1024, lowest - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:  # somebody listens there
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return list(range(first, first + count))


def mount_tmpfs(path, options):
    """Mount a tmpfs at ``path``. Without permission to do so skip the test, or with MEGARL_REQUIRE_TMPFS=1 fail it."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        why = f"needs root and permission to mount a tmpfs: {mounted.stderr.strip()}"
        pytest.fail(why) if os.environ.get("MEGARL_REQUIRE_TMPFS") == "1" else pytest.skip(why)


def children():
    """The running descendants of this process, without its own fork server and those of other tests."""
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # the process has ended
            if process.name() == SERVER_NAME or "multiprocessing.resource_tracker" in str(process.cmdline()):
                found -= {process, *process.children(recursive=True)}
    return {process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


def fork_server_of(pid):
    """The fork server of the `megarl` with this process id; None if there is none (yet)."""
    with contextlib.suppress(psutil.Error):  # the command or the server has ended
        for process in psutil.Process(pid).children():
            if process.name() == SERVER_NAME and process.status() != psutil.STATUS_ZOMBIE:
                return process
    return None


def processes_of(pid, phase):
    found, below = [], []
    with contextlib.suppress(psutil.Error):  # the command has ended
        below = psutil.Process(pid).children(recursive=True)
    for process in below:
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(f"{phase}:"):
                found.append(process)
    return found


def processes_with_files_in(run):
    """All processes that have the run directory on their command line, or a file of it open, such as their log."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            names = [*process.cmdline(), *(file.path for file in process.open_files())]
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and str(run) in str(names):
                left.append(process)
    return left


def wait_until_nobody_works_on(run, seconds=60):
    """Wait until no process works on the run: killed ones take a moment to end. Fails with those that are left."""
    deadline = time.monotonic() + seconds
    while left := processes_with_files_in(run):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.01)


def wait_for(command, condition):
    while not condition():
        assert command.poll() is None, f"the command ended before that: {command.stdout}{command.stderr}"
        time.sleep(0.002)


def wait_until_held(command, marker):
    """Wait until a process of the command is held (`tests.zygote.hold`); returns its process id."""
    wait_for(command, lambda: marker.exists() and marker.read_text())
    return int(marker.read_text())


def stop_and_release(command, number, marker):
    """Send a stop signal to a command, and release the process that is held once the phase has been asked to stop."""
    command.send_signal(number)
    wait_for(command, lambda: "stopping" in command.stderr)  # then it signals its processes, and sleeps between polls
    sleeps = psutil.Process(command.pid).num_ctx_switches
    before = sleeps().voluntary
    wait_for(command, lambda: sleeps().voluntary > before + 1)
    marker.write_text("")


def write_guessing_model(source, path, begins=2, guesses=(3, 4, 5), said=slice(3, None), again=0.4):
    """Write the quickstart's untrained model with two constant directions in its embeddings that decide the next token.

    After "=" comes a, b or c; after a letter mostly the end of the response. All other weights stay random. Or, for
    other tokens: after ``begins`` comes one of ``guesses``; after one that is ``said`` mostly the end.
    """
    shutil.copytree(source, path)
    weights = load_file(path / "model.safetensors")
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    guesses, end = list(guesses), 1
    embeddings[:, :2] = head[:, :2] = 0
    embeddings[begins, 0] = embeddings[said, 1] = 8.0
    head[guesses, 0], head[guesses, 1], head[end, 1] = 1.0, again, 0.9
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def write_recipe(directory, model, words):
    """Write the tiny recipe and its prompt file, in which the answer to a word is its first letter."""
    path, prompts = directory / "recipe.toml", directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": word[0]}) + "\n" for word in words))
    path.write_text(RECIPE.format(model=model, prompts=prompts))
    return path


def metrics(run):
    return read_lines(run.metrics)


def events(run, kind):
    return [event for event in read_lines(run.events) if event["event"] == kind]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_untrained_model(path):
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    try:
        from make_base import write_initial_model
    finally:
        sys.path.pop(0)
    write_initial_model(path)


def lines_so_far(path):
    """The objects of the whole lines of a file to which a process may be appending; it may not exist yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def peak_memory(call):
    """The call's result, and by how many bytes it let the resident set grow, with mapped files."""

    def resident(name):
        return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    result = call()
    return result, resident("VmHWM") - before


def five_letters():
    return ["".join(letters) for letters in itertools.product("abc", repeat=5)]


def write_laboratory(folder):
    write_untrained_model(folder / "initial")
    write_guessing_model(folder / "initial", folder / "model")
    return write_recipe(folder, folder / "model", five_letters())


def broken_links(pages):
    """ "page: link" of every relative link of Markdown pages that leads to no file, or to no heading of its page."""

    def prose(page):
        return re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", page.read_text())

    def headings(page):
        lines = re.findall("(?m)^#+ (.*)", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
        return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}

    found = []
    for page in pages:
        for link in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in headings(target))):
                found.append(f"{page}: {link}")
    return found
