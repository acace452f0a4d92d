"""Precompiled headers never change whether a program is right."""

import fcntl
import re
import threading
from pathlib import Path

import pytest

from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards import cpp
from megarl.rewards.code import Code

ADDS = "int main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"


def score(program):
    prompt = Prompt(0, "?", (1,), "", {"metadata": {"tests": [{"input": "1 2", "output": "3"}]}})
    return Code(RewardTable(kind="code", language="cpp")).score(prompt, program).value


@pytest.mark.parametrize(
    ("beginning", "header"),
    [
        ("#include <iostream>\n", "iostream"),
        ("// why\n\n# include  <vector> // of numbers\r\n#include<iostream>\n", "iostream"),
        ("#include <iostream>\n#include <bits/stdc++.h>\nusing namespace std;\n", "bits/stdc++.h"),
        ("#include <vector>\n", None),
        ("using namespace std;\n#include <iostream>\n", None),
        ("#define private public\n#include <iostream>\n", None),
        ('#pragma GCC target("avx2")\n#include <bits/stdc++.h>\n', None),
        ('#include "mine.h"\n#include <iostream>\n', None),
        ("/* */ #include <iostream>\n", None),
        ("// the next line is a comment, too \\\n#include <iostream>\n", None),
        ("", None),
    ],
)
def test_which_precompiled_header_a_program_can_use(beginning, header):
    assert cpp.header_of(f"{beginning}int main() {{}}\n".encode()) == header


def test_a_precompiled_header_is_used_only_where_the_program_includes_it_and_it_is_intact(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path))
    there = b"#include <vector>\n#include <iostream>\n" + ADDS.replace("a + b", "a + b + precompiled").encode()
    assert not cpp.compiled(there).succeeded
    cpp.precompile("iostream", b"#include <iostream>\nconstexpr int precompiled = 0;")
    (cpp.headers_folder() / "iostream").write_text("#include <iostream>\n")
    assert cpp.compiled(there).succeeded, "the precompiled header is used"
    assert score(f"#include <iostream>\n{ADDS}") == 1
    assert score(f"#define unused\n#include <iostream>\n{ADDS}") == 1
    assert score(f"#include <iostream>\nstd::map<int, int> m;\n{ADDS}") == 0, "it does not include <map>"
    path = cpp.headers_folder() / "iostream.gch"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert score(f"#include <iostream>\n{ADDS}") == 1, "a damaged precompiled header is not used"


def test_programs_are_compiled_without_precompiled_headers_too(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "none"))
    assert score(f"#include <bits/stdc++.h>\n{ADDS}") == 1


def test_headers_that_another_process_is_making_are_awaited(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path))
    folder = cpp.headers_folder()
    folder.mkdir()
    theirs = [folder / f"{header}.gch" for header in cpp.HEADERS]
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=cpp.make_headers)
        thread.start()
        waits = f"-> FLOCK .*:{(folder / '.lock').stat().st_ino} "
        while not re.search(waits, Path("/proc/locks").read_text()):
            assert thread.is_alive()
        for path in theirs:
            path.parent.mkdir(exist_ok=True)
            path.write_text("theirs")
    thread.join()
    assert {path.read_text() for path in theirs} == {"theirs"}


def test_headers_that_cannot_be_written_are_only_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "file"))
    cpp.make_headers()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("without a precompiled" in line for line in lines)
