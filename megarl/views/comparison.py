"""``megarl compare A B``: two policies on the same prompts, from the responses that evaluations stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.estimates import Difference, paired, pass_at
from megarl.storage.best import best_version
from megarl.storage.evaluations import Answered
from megarl.storage.run_dir import RunDir

TOLD = 60  # characters of a prompt in a message


@dataclass(frozen=True)
class Side:
    """A policy of a run."""

    name: str  # as it was asked for
    run: Path
    version: int | None  # None: the last that a suite was answered by

    @classmethod
    def parse(cls, text: str) -> Side:
        """Of ``DIR``, ``DIR:UPDATE`` or ``DIR:best``."""
        path, colon, place = text.rpartition(":")
        if not colon or Path(text).exists():
            path, place = text, ""
        run = RunDir.open(Path(path))
        if place == "best":
            return cls(text, run.root, best_version(run))
        if place and not place.isdecimal():
            raise UserError(f"{text}: after the colon stands the number of an update, or best")
        return cls(text, run.root, int(place) if place else None)

    def newest(self, suite: str) -> int | None:
        """Updates of the last policy that answered a suite."""
        return max(Answered.of(self.run, suite).versions(), default=None)

    def suites(self) -> list[str]:
        return sorted(path.parent.name for path in self.run.glob("evaluations/*/prompts.jsonl"))

    def correct(self, suite: str) -> tuple[int, np.ndarray]:
        """(updates of the policy, [prompts, samples] of 1 and 0); `UserError` where it has not answered the suite."""
        answered = Answered.of(self.run, suite)
        versions = answered.versions()
        version = self.version if self.version is not None else self.newest(suite)
        if version is None or version not in versions:
            there = f"evaluated are updates {', '.join(map(str, versions))}" if versions else "nothing is evaluated"
            raise UserError(f"{self.name} has no whole evaluation of suite {suite!r} there: {there}")
        return version, np.array([[r.correctness for r in group.responses] for group in answered.read(version)])


def compare(a: str, b: str, suite: str | None = None, as_json: bool = False) -> str:
    """B less A on each suite that both have, or on ``suite``; `UserError` where they were asked other prompts.

    Two runs of which no policy is named are compared after the last update at which both were evaluated.
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
    """Of one suite; accuracies and their paired difference, avg@n and pass@k."""
    check_same_prompts(Answered.of(a.run, suite), Answered.of(b.run, suite))
    (first, ours), (second, theirs) = (side.correct(suite) for side in at_equal_updates(a, b, suite))
    estimates, shared = [], min(ours.shape[1], theirs.shape[1])
    for k in sorted({1, shared}):
        x, y = (scores.mean(1) if k == 1 else pass_at(scores)[:, k - 1] for scores in (ours, theirs))
        what = f"avg@{ours.shape[1]}" if ours.shape[1] == theirs.shape[1] else "avg"
        means = {"a": float(x.mean()), "b": float(y.mean())}
        estimates.append({"name": what if k == 1 else f"pass@{k}"} | means | asdict(paired(x, y)))
    ends = {side.name: side.newest(suite) for side in (a, b) if side.version is None}
    return {
        "suite": suite,
        "prompts": len(ours),
        "a": {"name": a.name, "update": first},
        "b": {"name": b.name, "update": second},
        "estimates": estimates,
        "goes_on_to": {name: end for name, end in ends.items() if first == second < (end or 0)},
    }


def _table(found: dict[str, Any]) -> str:
    a, b = (f"{side} = {found[key]['name']} (update {found[key]['update']})" for side, key in (("A", "a"), ("B", "b")))
    lines = [f"{found['suite']}: {found['prompts']} prompts, {a}, {b}"]
    for one in found["estimates"]:
        low, high = one["ci95"]
        lines.append(
            f"  {one['name']:8} {one['a']:.4f} -> {one['b']:.4f}  {one['mean']:+.4f} [{low:+.4f}, {high:+.4f}]  "
            f"{one['better']} prompts better, {one['worse']} worse, sign test p = {one['p_value']:.3g}"
        )
    return "\n".join([*lines, *(f"  {name} goes on to update {end}" for name, end in found["goes_on_to"].items())])


def at_equal_updates(a: Side, b: Side, suite: str) -> tuple[Side, Side]:
    """Both after the last update, but the base model, at which both were evaluated, unless one was asked for."""
    shared = {*Answered.of(a.run, suite).versions()} & {*Answered.of(b.run, suite).versions()} - {0}
    if a.version is None and b.version is None and shared:
        return replace(a, version=max(shared)), replace(b, version=max(shared))
    return a, b


def difference_at(a: Path, b: Path, suite: str, update: int) -> Difference:
    """avg@n of the run in ``b`` less that of ``a`` after so many updates, paired; `UserError` as in `compare`."""
    check_same_prompts(Answered.of(a, suite), Answered.of(b, suite))
    ours, theirs = (Side(str(run), run, update).correct(suite)[1].mean(1) for run in (a, b))
    return paired(ours, theirs)


def check_same_prompts(a: Answered, b: Answered) -> None:
    """`UserError` with the first prompt that is another one. Questions and answers count, not how they are rendered."""
    ours, theirs = ([_question(line) for line in side.read_prompts()] for side in (a, b))
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            raise UserError(
                f"prompt {number} of {a.directory} is {one[0]:.{TOLD}} with the answer {one[1]!r:.{TOLD}}, of "
                f"{b.directory} {other[0]:.{TOLD}} with {other[1]!r:.{TOLD}}: only the same prompts can be compared"
            )
    if len(ours) != len(theirs):
        both = min(len(ours), len(theirs))
        extra, place = (ours[both], a) if len(ours) > both else (theirs[both], b)
        raise UserError(
            f"{a.directory} has {len(ours)} prompts, {b.directory} {len(theirs)}: prompt {both}, {extra[0]:.{TOLD}}, "
            f"is in {place.directory} alone; only the same prompts can be compared"
        )


def _question(line: dict[str, Any]) -> tuple[str, Any]:
    return repr(line["question"]), line["answer"]
