"""Commands that megarl prints can be pasted into a shell, whatever characters the paths in them have."""

import argparse
import ast
import re
import shlex
import subprocess
from pathlib import Path

from megarl.foreign import quoted
from tests.helpers import ROOT

COMMAND = re.compile(r"(?:megarl (?!needs|process|reads|trains)[a-z]+|python|hf download) [^`\n#]*")
NO_PATHS = re.compile(
    r"(html\.escape\()?quoted\(.*|[\w.]*\b(number|stage|first_update|name|cls)"
    r"|branch|setting|platform.*"
)


def printed_commands():
    """(file, line, the f-string with its fields as {expression}) of every command in the code."""
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else f"\0{ast.unparse(part.value)}\0"
                    for part in node.values
                )
                for command in COMMAND.findall("".join(parts)):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", command


def test_every_path_in_a_printed_command_is_quoted():
    found = list(printed_commands())
    assert len(found) > 12
    for where, command in found:
        for field in re.findall("\0([^\0]*)\0", command):
            assert NO_PATHS.fullmatch(field), f"{where}: {field} in {command!r}"


def test_a_quoted_path_is_one_word_for_a_shell_and_no_option():
    paths = ["a b", "it's", 'say "x"', "$HOME", "a;b", "*", "ü", "", "a\nb", "~", "#x", "{a,b}", "!x", "%s", "a\\b"]
    command = f"printf '%s\\0' {' '.join(map(quoted, paths))}"
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert said.stdout.split("\0")[:-1] == paths
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    for path in ("-run", "--stage", "-", "-r un"):
        assert parser.parse_args(shlex.split(quoted(Path(path)))).run_dir == Path(path)
