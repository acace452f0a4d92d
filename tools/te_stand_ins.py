"""Compares the tests' stand-ins for Transformer Engine with its source.

``python tools/te_stand_ins.py CLONE [TAG...]``; CLONE: a git repository of Transformer Engine with its tags. Prints
each function or method of `STAND_INS` whose arguments differ from those of a tag; the exit status is then 1.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

STAND_INS = Path(__file__).resolve().parents[1] / "tests/actor/stand_ins/transformer_engine/pytorch"
TAGS = ("v2.9", "v2.11")  # the oldest and the newest version that Megatron-Core 0.16.1 declares
FILES = {  # of stand-ins: those of Transformer Engine with the same names
    "__init__.py": ("linear", "grouped_linear"),
    "permutation.py": ("permutation",),
    "router.py": ("router",),
    "distributed.py": ("distributed",),
    "attention/rope.py": ("rope",),
}
FOLDERS = ("module/", "attention/", "")
SINCE = {("GroupedLinear.__init__", "name"): "v2.11"}  # arguments that the oldest version has not yet


def signatures(source: str) -> dict[str, list[str]]:
    """{function, or class.method: its named arguments in order}."""
    return dict(_signatures(ast.parse(source).body, ""))


def _signatures(nodes: list[ast.stmt], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from _signatures(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args
            yield prefix + node.name, [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]


def upstream(clone: str, tag: str, name: str) -> str:
    for folder in FOLDERS:
        path = f"transformer_engine/pytorch/{folder}{name}.py"
        shown = subprocess.run(["git", "-C", clone, "show", f"{tag}:{path}"], capture_output=True, text=True)
        if not shown.returncode:
            return shown.stdout
    raise SystemExit(f"{tag} has no {name}.py")


def differences(clone: str, tag: str) -> Iterator[str]:
    for file, names in FILES.items():
        theirs: dict[str, list[str]] = {}
        for name in names:
            theirs |= signatures(upstream(clone, tag, name))
        for function, ours in signatures((STAND_INS / file).read_text()).items():
            expected = [a for a in ours if SINCE.get((function, a), tag) == tag]
            if not function.startswith("_") and expected != theirs.get(function):  # those are helpers of its own
                yield f"{tag} {function}: {theirs.get(function)}, the stand-in: {ours}"


def main(clone: str, *tags: str) -> int:
    found = [line for tag in tags or TAGS for line in differences(clone, tag)]
    print("\n".join(found) or f"no difference in {', '.join(tags or TAGS)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
