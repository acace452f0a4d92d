"""Precompiled headers never change whether a program is right."""

import fcntl
import json
import re
import subprocess
import threading
from pathlib import Path

import pytest

from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards import cpp_headers
from megarl.rewards.code import Code
from megarl.rewards.cpp import compiled

ADDS = "int main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
ALL = "#include <bits/stdc++.h>\n"


@pytest.fixture(scope="module")
def headers():
    """The folder with all precompiled headers."""
    cpp_headers.make_headers()
    return cpp_headers.headers_folder()


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
    assert cpp_headers.header_of(f"{beginning}int main() {{}}\n".encode()) == header


def test_a_precompiled_header_is_used_only_where_the_program_includes_it_and_it_is_intact(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path))
    there = b"#include <vector>\n#include <iostream>\n" + ADDS.replace("a + b", "a + b + precompiled").encode()
    assert not compiled(there).succeeded
    cpp_headers.precompile("iostream", b"#include <iostream>\nconstexpr int precompiled = 0;")
    (cpp_headers.headers_folder() / "iostream").write_text("#include <iostream>\n")
    assert compiled(there).succeeded, "the precompiled header is used"
    assert score(f"#include <iostream>\n{ADDS}") == 1
    assert score(f"#define unused\n#include <iostream>\n{ADDS}") == 1
    assert score(f"#include <iostream>\nstd::map<int, int> m;\n{ADDS}") == 0, "it does not include <map>"
    path = cpp_headers.headers_folder() / "iostream.gch"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert score(f"#include <iostream>\n{ADDS}") == 1, "a damaged precompiled header is not used"


@pytest.mark.parametrize(
    ("program", "common"),
    [
        (ADDS, True),
        ("#include <vector>\nstd::vector<int> sum, start, k, N, v; std::map<int, int> num;" + ADDS, True),
        ("void solve() { long long h = static_cast<long long>(1), stride, digits; }" + ADDS, True),
        ("std::shared_ptr<int> p;" + ADDS, False),
        ("auto now = std::chrono::steady_clock::now(); std::mt19937_64 any(7);" + ADDS, False),
        ("double x = std::beta(1., 2.), y = PRIX64[0];" + ADDS, False),
        ("#include <ext/pb_ds/assoc_container.hpp>\n" + ADDS, False),
        ("#if __has_include(<regex>)\n#endif\n" + ADDS, False),
        ("#define JOIN(x, y) x##y\nstd::JOIN(shared_, ptr)<int> p;" + ADDS, False),
        ("std::shared_\\\nptr<int> p;" + ADDS, False),
        ("int v1s, x = 0x10 + 1'000; bool y = std::abs(1.5e-3) < 2;" + ADDS, True),
        ("using namespace std; auto x = 10s;" + ADDS, False),
        ("using namespace std; auto x = 0x10s;" + ADDS, False),
        ("using namespace std; auto x = 1.5e3ms;" + ADDS, False),
        ('using namespace std; auto x = operator""s(10ull);' + ADDS, False),
        ("std::shared_\\ \nptr<int> p;" + ADDS, False),
        ("#import <ext/pb_ds/assoc_container.hpp>\n" + ADDS, False),
        ("std::pmr::vector<int> v;" + ADDS, False),
        ("void show(std::uniform_int_distribution<int> it) { std::cout << it; }" + ADDS, False),
        ("int MEGARL_COMMON;" + ADDS, False),
        ("#include \\\n<vector>\n" + ADDS, False),
    ],
)
def test_which_programs_need_only_the_common_headers(headers, program, common):
    assert (cpp_headers.COMMON in cpp_headers.options(f"{ALL}{program}".encode())[0]) == common
    assert score(f"{ALL}{program}") == 1


@pytest.mark.parametrize(
    "program",
    [
        "std::complex<double> one[1]; double o[1]; auto f = std::transform(one, one + 1, o, std::abs<double>);",
        'long double operator""h(long double x) { return x; } auto x = operator""h(1.0L);',
    ],
)
def test_a_program_that_does_not_compile_with_the_whole_header_scores_0(headers, program):
    assert score(f"{ALL}using namespace std;\n{program}\n{ADDS}") == 0


@pytest.mark.parametrize("own", ["int beta", "int regex", "struct thread {}", "int optarg", "int lock", "void kill()"])
def test_a_program_that_defines_a_name_of_the_whole_header_scores_as_without_precompiled_headers(headers, own):
    """Each name clashes with a declaration that only the whole header has, at the latest where it is used."""
    used = f"{ALL}using namespace std;\n{own};\nauto used = sizeof({own.split()[1].rstrip('()')});\n{ADDS}"
    assert cpp_headers.COMMON not in cpp_headers.options(used.encode())[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_CACHE", "/nowhere")
        expected = score(used)
    assert score(used) == expected


def test_the_declarations_of_a_header_are_found(headers):
    text = b"""#define MACRO(parameter) body
    namespace outer { struct Class { int member; void method(int) { int local; } }; enum Plain { PLAIN }; }
    enum class Scoped { SCOPED };
    template <class Parameter> struct Announced;
    extern "C" { int function(int parameter); }
    namespace other { using outer::Plain; }
    inline void elsewhere() { "text"; 1.e5; 'c'; }
    """
    found = cpp_headers.declared(text)
    words = {name for kind, name in found if kind == "word"}
    assert {b"outer", b"Class", b"Plain", b"PLAIN", b"Scoped", b"Announced", b"function", b"elsewhere"} <= words
    assert not {b"MACRO", b"body", b"member", b"method", b"local", b"SCOPED", b"text", b"e5", b"c"} & words
    assert {("macro", b"MACRO"), ("using", b"Plain"), ("body", b"Class")} <= found
    assert ("body", b"Announced") not in found


@pytest.mark.parametrize(
    "own", ["auto use_{} = sizeof(std::{}) + sizeof({});", "template <class T> int {}(T, T, T, T, T);"]
)
def test_every_word_compiles_with_the_common_headers_if_and_only_if_it_does_with_the_whole(headers, tmp_path, own):
    """Tries all words that the whole header declares and that a program with the common headers may contain."""
    (tmp_path / "bits").mkdir()
    (tmp_path / "bits/stdc++.h").write_text(cpp_headers.TEXTS[cpp_headers.COMMON])
    command = ["g++", "-std=gnu++17", "-fsyntax-only", "-fmax-errors=0", "-w", "-x", "c++", "-"]
    rest = set(json.loads((headers / cpp_headers.REST).read_bytes())["names"])
    found = {name.decode() for _, name in cpp_headers.declared(ALL.encode())}
    words = {name for name in found if name not in rest and name[0] != "_"}
    source = f"{ALL}using namespace std;\n" + "\n".join(own.replace("{}", word) for word in sorted(words))
    errors = []
    for options in ((), ("-I", tmp_path)):
        run = subprocess.run([*command, *options], input=source, capture_output=True, text=True)
        errors.append({int(line) for line in re.findall(r"^<stdin>:(\d+):\d+: error", run.stderr, re.MULTILINE)})
    assert len(words) > 1500
    assert errors[0] == errors[1]


def test_programs_are_compiled_without_precompiled_headers_too(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "none"))
    assert cpp_headers.options(f"{ALL}{ADDS}".encode()) == ("", {})
    assert score(f"{ALL}{ADDS}") == 1


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The folder for precompiled headers, which are replaced by tiny ones that are made in no time."""
    texts = {cpp_headers.WHOLE: "int both, whole;\n", cpp_headers.COMMON: "#define COMMON\nint both;\n"}
    monkeypatch.setattr(cpp_headers, "TEXTS", texts)
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path))
    return cpp_headers.headers_folder()


@pytest.mark.parametrize("damage", [b"", b'{"names": []}', None])
def test_the_common_headers_are_not_used_if_the_list_of_the_other_names_is_missing_or_damaged(small, damage):
    cpp_headers.make_headers()
    program = f"{ALL}int main() {{}}".encode()
    assert cpp_headers.COMMON in cpp_headers.options(program)[0]
    names = small / cpp_headers.REST
    made = names.read_bytes()
    assert set(json.loads(made)["names"]) == {"whole", "COMMON", *(name.decode() for name in cpp_headers.LESS)}
    cpp_headers._read_rest.cache_clear()
    names.unlink()
    if damage is not None:
        names.write_bytes(damage)
    assert cpp_headers.options(program)[0] == f"-include {cpp_headers.INSIDE}/{cpp_headers.WHOLE}"
    cpp_headers.make_headers()
    assert names.read_bytes() == made


def test_headers_that_another_process_is_making_are_awaited(small):
    small.mkdir()
    theirs = [small / f"{header}.gch" for header in cpp_headers.TEXTS]
    with open(small / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=cpp_headers.make_headers)
        thread.start()
        waits = f"-> FLOCK .*:{(small / '.lock').stat().st_ino} "
        while not re.search(waits, Path("/proc/locks").read_text()):
            assert thread.is_alive()
        cpp_headers.write_checked(small / cpp_headers.REST, {"names": []})
        for path in theirs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("theirs")
    thread.join()
    assert {path.read_text() for path in theirs} == {"theirs"}


def test_headers_that_cannot_be_written_are_only_reported(small, capsys):
    for header in cpp_headers.TEXTS:
        (small / header).mkdir(parents=True)
    cpp_headers.make_headers()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("is a directory" in line for line in lines)


def test_a_long_program_is_searched_in_linear_time(small):
    """A search in quadratic time would take an hour."""
    cpp_headers.make_headers()
    assert cpp_headers.options(f"{ALL}int main() {{}} // {'1.' * 1_000_000}".encode())[0]
