"""The rules of CONTRIBUTING.md that a program can check: sizes, repeated code, and references to missing modules."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import token
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import ROOT, broken_links
from tests.suites import SUITES

FUNCTION_LINES, SHARED_LINES = 60, 10
SOURCES = sorted(
    path for folder in ("megarl", "launch", "tools", "benchmarks", "lab") for path in ROOT.glob(f"{folder}/**/*.py")
)
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "megarl")]


def test_functions_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES  # type: ignore[operator]
    ]
    assert found == []


def code_lines(source: str) -> list[tuple[int, str]]:
    """(line number, tokens) of each line of code, without comments, docstrings, imports and lone brackets."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    texts: dict[int, str] = {}
    for piece in tokenize.generate_tokens(io.StringIO(source).readline):
        if piece.type != token.COMMENT and piece.start[0] not in left_out:
            texts[piece.start[0]] = f"{texts.get(piece.start[0], '')} {piece.string.strip()}"
    return [(number, text) for number, text in texts.items() if re.search(r"\w", text)]


def shared_runs(sources: dict[str, str], length: int) -> list[str]:
    """Places that repeat ``length`` lines of an earlier place, as "file:line ~ file:line"."""
    seen: dict[tuple[str, ...], str] = {}
    found: list[str] = []
    for name, source in sources.items():
        lines = code_lines(source)
        for start in range(len(lines) - length + 1):
            place = f"{name}:{lines[start][0]}"
            original = seen.setdefault(tuple(text for _, text in lines[start : start + length]), place)
            found += [f"{place} ~ {original}"] * (original != place)
    return found


def test_no_ten_lines_are_repeated() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in PACKAGE}
    assert shared_runs(sources, SHARED_LINES) == []
    doubled = {"a": sources["megarl/errors.py"], "b": "# say\n" + sources["megarl/errors.py"]}
    assert shared_runs(doubled, SHARED_LINES)


# a file of a policy, the metadata of an installed package, and modules of tests that cannot be imported or are added
NO_MODULES = {f"megarl.{name}" for name in ("json", "dist", "workers.no_such_module")}
MADE_BY_THE_BUILD = ("megarl/kernels/lib", "megarl/rewards/bin")


def tracked_texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".svg", ".gz", ".xz", ".parquet", ".safetensors"):
            yield name, path.read_text()


# `megarl` and `apex` on the package index are other people's projects; a path such as . or '.[vllm]' is a clone's
STRANGERS = re.compile(
    r"""(?:pip3?|uv) +(?:install|add|download)\b[^\n`|#&;]*?(?<! of)[ '"](?:megarl|apex)(?![\w/.-])"""
)
PIECES = re.compile(r"""["'] *\n\s*(?:rf|fr|f|r)?["']""")  # between two pieces of a message, on two lines of Python
NAMED = re.compile(r"""pip3? +install +(?:-\S+ +)*['"]?([a-z][\w-]*)""")


def test_no_text_tells_anybody_to_install_a_package_of_somebody_else() -> None:
    split = '"pip install "\n    f"megarl for {it}"'
    for command in ("pip install 'megarl[sql]', or", "python -m pip install -U megarl==1", "uv add apex", split):
        assert STRANGERS.search(PIECES.sub("", command)), command
    for command in ("pip install '.[vllm]' in a clone of megarl", "pip install megarl-core"):
        assert not STRANGERS.search(command), command
    texts = {name: text for name, text in tracked_texts() if name != "tests/test_house_rules.py"}
    found = {name: STRANGERS.search(PIECES.sub("", text)) for name, text in texts.items()}
    assert [f"{name}: {command[0]}" for name, command in found.items() if command] == []


def test_messages_name_the_extra_and_not_the_packages_that_it_installs() -> None:
    """A package that is installed by name may be of a version that megarl does not know."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {re.split(r"[^\w-]", line)[0] for extra in extras.keys() - {"dev"} for line in extras[extra]}
    assert NAMED.findall("pip install -U 'duckdb>=2'") == ["duckdb"] and "duckdb" in packages
    texts = {path: PIECES.sub("", path.read_text()) for path in PACKAGE}
    assert [(path, name) for path, text in texts.items() for name in NAMED.findall(text) if name in packages] == []


def is_there(reference: str) -> bool:
    """Whether ``megarl.a.b`` is a module, or names in the source of one."""
    path, names = ROOT / reference.replace(".", "/"), []
    while path != ROOT:
        for source in (path / "__init__.py", path.with_suffix(".py"), path / "__main__.py"):
            if source.is_file():
                return all(re.search(rf"\b{name}\b", source.read_text()) for name in names)
        names.append(path.name)
        path = path.parent
    return False


def missing_modules(text: str) -> set[str]:
    """The references ``megarl.a.b`` and paths ``megarl/a/b.py`` in ``text`` to things that do not exist."""
    dotted = set(re.findall(r"(?<![\w./-])megarl(?:\.(?!__)[A-Za-z_]\w*)+", text)) - NO_MODULES
    for module, names in re.findall(r"(?m)^\s*from (megarl[\w.]*) import (\([^)]*\)|[^\n(]+)$", text):
        dotted |= {f"{module}.{name}" for name in re.findall(r"(?m)(?:^|[,(])\s*(\w+)", re.sub("#.*", "", names))}
    paths = {path.rstrip("./") for path in re.findall(r"(?<![\w.-])megarl/[\w/]+(?:\.\w+|/)", text)}
    dotted |= {
        f"{path}.{name}".replace("/", ".") for path, name in re.findall(r"`(megarl/[\w/]+)\.py: ([\w.]+)`", text)
    }
    gone = {reference for reference in dotted if not is_there(reference)}
    return gone | {path for path in paths if not (ROOT / path).exists() and not path.startswith(MADE_BY_THE_BUILD)}


def test_every_module_that_is_referred_to_exists() -> None:
    assert missing_modules("from megarl.recipe.load import load_recipe, gone") == {"megarl.recipe.load.gone"}
    assert missing_modules("`megarl.launcher` [it](../megarl/launcher.py)") == {"megarl.launcher", "megarl/launcher.py"}
    this = str(Path(__file__).relative_to(ROOT))
    found = {name: gone for name, text in tracked_texts() if name != this and (gone := missing_modules(text))}
    assert found == {}


def test_links_between_documents_lead_somewhere() -> None:
    assert broken_links([ROOT / name for name, _ in tracked_texts() if name.endswith(".md")]) == []


def test_no_test_measures_how_long_something_takes() -> None:
    clock = re.compile(r"= *time\.(process_time|perf_counter|thread_time)\b|\bgetrusage\(")
    tests = ROOT.glob("tests/**/*.py")
    assert [str(path.relative_to(ROOT)) for path in tests if clock.search(path.read_text())] == []


def test_contributing_has_every_make_target_and_suite_in_its_table() -> None:
    """At most ten targets, so that they can be kept in mind."""
    targets = re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text())
    table = (ROOT / "CONTRIBUTING.md").read_text()
    assert sorted(re.findall(r"(?m)^\| `make ([\w-]+)` \|", table)) == sorted(targets)
    assert re.findall(r"(?m)^\| - `WHAT=([\w-]+)` \|", table) == [name for name in SUITES if name != "test"]
    assert len(targets) <= 10
