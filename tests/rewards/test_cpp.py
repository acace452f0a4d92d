"""Precompiled headers never change whether a program is right."""

import fcntl
import re
import threading
from pathlib import Path

from megarl.rewards import cpp
from tests.rewards.pooling import prompt_for, scorer

ADDS = "int main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"


def score(program):
    prompt = prompt_for(tests=[{"input": "1 2", "output": "3"}], language="cpp")
    return scorer("code").score(prompt, program).value


def test_a_precompiled_header_is_used_only_where_it_cannot_change_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path))
    marked = ADDS.replace("a + b", "a + b + precompiled")
    assert score(f"#include <iostream>\n{ADDS}") == 1, "without precompiled headers"
    cpp.precompile("iostream", "#include <iostream>\nconstexpr int precompiled = 0;")
    assert cpp.compiled(f"// why\n#define mine\n#include<iostream>\n{marked}".encode()).succeeded
    for before in ("#include <vector>", "#define private public"):
        assert not cpp.compiled(f"{before}\n#include <iostream>\n{marked}".encode()).succeeded, before
    assert score(f"#include <vector>\n#include <iostream>\n{ADDS}") == 1
    assert score(f"#include <iostream>\nstd::map<int, int> m;\n{ADDS}") == 0, "it does not include <map>"
    path = cpp.headers_folder() / "iostream.gch"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert score(f"#include <iostream>\n{ADDS}") == 1, "a damaged precompiled header is not used"


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
    assert "without precompiled headers: " in capsys.readouterr().err
