"""``megarl compare A B``: compares two policies on the same prompts, from the responses that evaluations stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.estimates import Difference, paired, pass_at
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.evaluations import SuiteResponses
from megarl.storage.run_dir.retention import best_version

SHOWN = 120  # characters of a prompt in a message


@dataclass(frozen=True)
class Side:
    """A policy of a run, one of the two that are compared."""

    name: str  # as it was given on the command line
    run: Path
    version: int | None  # updates of the policy; None: the last one that was evaluated on a suite

    @classmethod
    def parse(cls, text: str) -> Side:
        """From ``DIR``, ``DIR:UPDATE`` or ``DIR:best``; `UserError` for anything else."""
        path, colon, place = text.rpartition(":")
        if not colon or Path(text).exists():
            path, place = text, ""
        run = RunDir.open(Path(path))
        if place == "best":
            return cls(text, run.root, best_version(run))
        if place and not place.isdecimal():
            raise UserError(f"{text}: after the colon write the number of an update, or best")
        return cls(text, run.root, int(place) if place else None)

    def suites(self) -> list[str]:
        return sorted(path.parent.name for path in self.run.glob("evaluations/*/prompts.jsonl"))

    def correct(self, suite: str) -> tuple[int, np.ndarray]:
        """(updates of the policy, [prompts, samples] of 1 for right and 0); `UserError` without a whole evaluation."""
        answered = SuiteResponses.of(self.run, suite)
        versions = answered.versions()
        version = max(versions, default=None) if self.version is None else self.version
        if version is None or version not in versions:
            found = f"it has those of updates {', '.join(map(str, versions))}" if versions else "it has none at all"
            raise UserError(f"{self.name} has no complete evaluation of this policy on suite {suite!r}: {found}")
        return version, np.array([[r.correctness for r in group.responses] for group in answered.read(version)])


def compare(a: str, b: str, suite: str | None = None, as_json: bool = False) -> str:
    """B minus A on each suite that both have, or on ``suite``; `UserError` if their prompts differ.

    Two runs without a named policy are compared after the last update at which both were evaluated.
    """
    left, right = Side.parse(a), Side.parse(b)
    suites = [suite] if suite else [name for name in left.suites() if name in right.suites()]
    if not suites:
        raise UserError(
            f"{a} and {b} have no suite in common: {', '.join(left.suites()) or 'none'}; "
            f"{', '.join(right.suites()) or 'none'}"
        )
    found = [_estimates(name, left, right) for name in suites]
    return json.dumps(found) if as_json else "\n".join(map(_table, found))


def _estimates(suite: str, a: Side, b: Side) -> dict[str, Any]:
    """avg@n and pass@k of both policies on one suite, with their paired differences."""
    _check_same_prompts(SuiteResponses.of(a.run, suite), SuiteResponses.of(b.run, suite))
    (first, ours), (second, theirs) = (side.correct(suite) for side in at_equal_updates(a, b, suite))
    estimates, shared = [], min(ours.shape[1], theirs.shape[1])
    for k in sorted({1, shared}):
        x, y = (scores.mean(1) if k == 1 else pass_at(scores)[:, k - 1] for scores in (ours, theirs))
        what = f"avg@{ours.shape[1]}" if ours.shape[1] == theirs.shape[1] else "avg"
        means = {"a": float(x.mean()), "b": float(y.mean())}
        estimates.append({"name": what if k == 1 else f"pass@{k}"} | means | asdict(paired(x, y)))
    return {
        "suite": suite,
        "prompts": len(ours),
        "a": {"name": a.name, "update": first},
        "b": {"name": b.name, "update": second},
        "estimates": estimates,
        "differ": _differing(suite, (a, first), (b, second)),
    }


def _differing(suite: str, *policies: tuple[Side, int]) -> dict[str, list[Any]]:
    """{setting: its two values} for those in which two evaluations differ, but for the number of samples."""
    ours, theirs = (SuiteResponses.of(side.run, suite).settings(version) for side, version in policies)
    names = sorted((ours.keys() | theirs.keys()) - {"samples", "crc"}) if ours and theirs else []
    return {name: [ours.get(name), theirs.get(name)] for name in names if ours.get(name) != theirs.get(name)}


def _table(found: dict[str, Any]) -> str:
    a, b = (f"{side} = {found[key]['name']} (update {found[key]['update']})" for side, key in (("A", "a"), ("B", "b")))
    lines = [f"{found['suite']}: {found['prompts']} prompts, {a}, {b}"]
    for one in found["estimates"]:
        low, high = one["ci95"]
        lines.append(
            f"  {one['name']:8} {one['a']:.4f} -> {one['b']:.4f}  {one['mean']:+.4f} [{low:+.4f}, {high:+.4f}]  "
            f"{one['better']} prompts better, {one['worse']} worse, sign test p = {one['p_value']:.3g}"
        )
    lines += [f"  evaluated otherwise: {name} = {x!r} in A, {y!r} in B" for name, (x, y) in found["differ"].items()]
    return "\n".join(lines)


def at_equal_updates(a: Side, b: Side, suite: str) -> tuple[Side, Side]:
    """Both sides with the last update after 0 at which both were evaluated, unless one of them names its policy."""
    shared = {*SuiteResponses.of(a.run, suite).versions()} & {*SuiteResponses.of(b.run, suite).versions()} - {0}
    if a.version is None and b.version is None and shared:
        return replace(a, version=max(shared)), replace(b, version=max(shared))
    return a, b


def difference(a: Path, first: int, b: Path, second: int, suite: str) -> Difference:
    """avg@n of run ``b`` after ``second`` updates minus that of ``a`` after ``first``, paired.

    Raises `UserError` as `compare` does.
    """
    ours, theirs = scores([(a, first), (b, second)], suite)
    return paired(ours.mean(1), theirs.mean(1))


def scores(policies: Sequence[tuple[Path, int]], suite: str) -> list[np.ndarray]:
    """Of each policy (run, updates) [prompts, samples] of 1 for right and 0; `UserError` if their prompts differ."""
    first, *others = (SuiteResponses.of(run, suite) for run, _ in policies)
    for other in others:
        _check_same_prompts(first, other)
    return [Side(str(run), run, update).correct(suite)[1] for run, update in policies]


def _check_same_prompts(a: SuiteResponses, b: SuiteResponses) -> None:
    """`UserError` with the first prompt that differs in question or answer; the rendering does not matter."""
    ours, theirs = ([_question(line) for line in side.read_prompts()] for side in (a, b))
    for number, (one, other) in enumerate(zip_longest(ours, theirs, fillvalue="none")):
        if one != other:
            raise UserError(
                f"prompt {number}: {a.directory} has {one:.{SHOWN}}, {b.directory} has {other:.{SHOWN}}: only the same "
                "prompts can be compared"
            )


def _question(line: dict[str, Any]) -> str:
    return f"the answer {line['answer']!r} to {line['question']!r}"
