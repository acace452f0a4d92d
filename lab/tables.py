"""The tables of the lab, from the CSVs of lab/results.tar.xz alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from lab.claims import (
    ALARM,
    CLAIMS,
    EARLY,
    END,
    FIRST,
    MARGIN,
    SECOND,
    Claim,
    Finding,
    collapse,
    find,
    lead,
    verdict,
    warning,
)
from lab.results import Sweep, Value, at, difference, estimate, last, load, mean, read
from megarl.commands.sweep.results import Estimate

SETS = (FIRST, SECOND)
NAMES = (
    "frozen",
    "frozen_low",
    "learn",
    "long",
    "staleness",
    "batches",
    "pretrained",
)  # of the sweeps that claims are about
ONE_STAGE = ("frozen", "frozen_low", "learn", "long")  # of those of one stage of `END` updates
STALENESS = ("quick", "staleness")  # of those with an axis S
FRESH = 4  # updates in a stage, at most
Rows = list[list[str]]


def read_all() -> dict[str, Sweep]:
    """Every sweep of lab/results.tar.xz, by name; one that was not run is empty."""
    files = load()
    collected = sorted({file.partition("/")[0] for file in files})
    return {name: read(files, name) for name in (*NAMES, *(name for name in collected if name not in NAMES))}


def text(sweeps: Mapping[str, Sweep]) -> str:
    """All of them, in Markdown."""
    parts = [
        "# The lab's tables",
        "Made by `python -m lab.figures` from lab/results.tar.xz; docs/lab.md says what they mean. Brackets are 95 % "
        "intervals over seeds (Student's), differences are within a seed.",
        *_claims(sweeps),
    ]
    for name in ONE_STAGE:
        if sweeps[name].points:
            parts += [*_accuracies(name, sweeps[name]), *_tokens(name, sweeps[name]), *_warnings(name, sweeps[name])]
    if sweeps["long"].points:
        parts += _by_seed("long", sweeps["long"])
    for name in STALENESS:
        if name in sweeps and sweeps[name].points:
            parts += _staleness(name, sweeps[name])
    for name, sweep in sweeps.items():
        if name not in (*ONE_STAGE, *STALENESS) and sweep.points:
            parts += _plain(name, sweep)
    parts += _times(sweeps)
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(found: Estimate | None, sign: str = "", percent: bool = False) -> str:
    if found is None:
        return "-"
    scale, digits = (100, 2) if percent else (1, 3)
    low, high = (scale * bound for bound in found.ci95)
    return f"{scale * found.mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


# ----------------------------------------------------------------------------------------------------------- claims


def _claims(sweeps: Mapping[str, Sweep]) -> list[str]:
    note = (
        'A part holds where the whole interval lies on the claimed side of 0 (or within .05 of it, for "as"), '
        "is opposite where it lies on the other side, and open else. Reproduced: all parts hold. Partly: some do. Not "
        "reproduced: none does, and one is opposite. Cannot be seen at this size: all are open. Too few: all seeds "
        "were run, but what the part is about, a collapse, came in fewer than five; the claim then has no verdict. In "
        "brackets: the part was written when runs of these seeds had been seen, and does not count for them. [0, 5] "
        "and no veto are `mu_grpo_none`."
    )
    assert MARGIN == 0.05
    found = ["## Claims", note]
    for heading, claims in CLAIMS.items():
        head = [heading, *(f"seeds {seeds[0]} to {seeds[-1]}" for seeds in SETS)]
        found.append(_table(head, [row for claim in claims for row in _claim_rows(claim, sweeps)]))
    return found


def _claim_rows(claim: Claim, sweeps: Mapping[str, Sweep]) -> Rows:
    """The verdict, then the parts."""
    sets = [[find(part, sweeps, seeds) for part in claim.parts] for seeds in SETS]
    names = " and ".join(f"`lab/{name}.toml`" for name in dict.fromkeys(part.sweep for part in claim.parts))
    rows = [[f"**{claim.name}**, {names} ({claim.source})", *(f"**{verdict(findings)}**" for findings in sets)]]
    for number, part in enumerate(claim.parts):
        rows.append([part.text, *(_cell(findings[number]) for findings in sets)])
    return rows


def _cell(finding: Finding) -> str:
    words = f"{_text(finding.estimate, '+')} {finding.state}" if finding.estimate else finding.state
    return words if finding.counts or finding.state == "not run" else f"({words})"


# ------------------------------------------------------------------------------------------------------ one stage


def _accuracies(name: str, sweep: Sweep) -> list[str]:
    seeds = sweep.seeds
    columns: list[tuple[str, Callable[[str], Value]]] = [
        ("update 64", lambda point: at(point, 64)),
        ("update 128", lambda point: at(point, 128)),
        ("update 256", lambda point: at(point, END)),
        ("gain", lambda point: difference(at(point, END), at(point, 0))),
        ("less `grpo`", lambda point: difference(at(point, END), at("grpo", END))),
    ]
    rows = [
        [f"`{point}`", str(len(_finished(sweep, point)))]
        + [_text(estimate(sweep, seeds, value(point)), "+" if head[0] in "gl" else "") for head, value in columns]
        for point in sweep.points
    ]
    head = ["point", "seeds", *(head for head, _ in columns)]
    return [f"## Accuracy, one stage of {END} updates: `lab/{name}.toml`", _table(head, rows), *same_runs(sweep)]


def _by_seed(name: str, sweep: Sweep) -> list[str]:
    """Of a sweep whose runs of one point end so differently that a mean says little."""
    rows = []
    for point in sweep.points:
        curves = [sweep.curve(point, seed, "accuracy") for seed in sweep.seeds]
        cells = [f"{max(c.values()):.2f}, {c[EARLY]:.2f}, {c[END]:.2f}" if END in c else "-" for c in curves]
        rows.append([f"`{point}`", *cells])
    head = ["point", *(f"seed {seed}" for seed in sweep.seeds)]
    return [f"## Best accuracy, at update {EARLY}, at {END}, by seed: `lab/{name}.toml`", _table(head, rows)]


def same_runs(sweep: Sweep) -> list[str]:
    """Points that are not another comparison, since their runs are those of an earlier one."""
    found = []
    for first, second in itertools.combinations(sweep.points, 2):
        both = [s for s in sweep.seeds if sweep.at(first, s, END) is not None and sweep.at(second, s, END) is not None]
        if both and all(sweep.accuracy[first, s] == sweep.accuracy[second, s] for s in both):
            found.append(f"`{second}` has every accuracy of `{first}` (seeds {both[0]} to {both[-1]}): the same runs.")
    return found


def _finished(sweep: Sweep, point: str) -> list[int]:
    return [seed for seed in sweep.seeds if sweep.at(point, seed, END) is not None]


def _tokens(name: str, sweep: Sweep) -> list[str]:
    def muted(point: str) -> Value:
        return lambda s, seed: None if (kept := s.mean(point, seed, "kept_fraction")) is None else 1 - kept

    columns: list[tuple[str, Callable[[str], Value], bool]] = [
        ("without gradient, %", muted, True),
        ("clipped, %", lambda point: mean(point, "clip_fraction"), True),
        ("vetoed, %", lambda point: mean(point, "veto_fraction"), True),
        ("masked by M2PO, %", lambda point: mean(point, "m2_mask_fraction"), True),
        ("positive share of the loss", lambda point: mean(point, "positive_share/loss"), False),
        ("M2 of all tokens", lambda point: mean(point, "m2/all"), False),
        ("M2 at the end", lambda point: at(point, END, "m2/all"), False),
        ("entropy at the end", lambda point: at(point, END, "entropy"), False),
        ("ESS at the end", lambda point: at(point, END, "ess"), False),
    ]
    rows = [
        [f"`{point}`"]
        + [_text(estimate(sweep, sweep.seeds, value(point)), "", percent) for _, value, percent in columns]
        for point in sweep.points
    ]
    return [
        f"## What became of the tokens: `lab/{name}.toml`",
        "Means over all updates, at the end over the last 8. M2 is the second moment of the log-ratio.",
        _table(["point", *(head for head, *_ in columns)], rows),
    ]


def _warnings(name: str, sweep: Sweep) -> list[str]:
    rows: Rows = []
    for point in sweep.points:
        finished = _finished(sweep, point)
        fell = [seed for seed in finished if collapse(sweep, point, seed) is not None]
        row = [f"`{point}`", f"{len(fell)} of {len(finished)}"]
        for level in (0.9, ALARM, 0.7):
            warned = [seed for seed in finished if warning(sweep, point, seed, level) is not None]
            before = _text(estimate(sweep, fell, lead([point], level))).replace(".000", "")
            row += [f"{len(warned)} of {len(finished)}", before]
        rows.append(row)
    levels = [f"ESS < {level}" for level in (0.9, ALARM, 0.7)]
    head = ["point", "collapsed", *(text for level in levels for text in (level, "updates before"))]
    return [
        f"## Effective sample size before a collapse: `lab/{name}.toml`",
        "Collapsed: an evaluation found less than half of the best accuracy so far. Updates before: from the first 8 "
        "updates whose mean ESS is below the level to the last evaluation before the collapse, where both happened.",
        _table(head, rows),
    ]


# ------------------------------------------------------------------------------------------------------- staleness


def sizes_of(sweep: Sweep) -> list[int]:
    """The values of its axis S, the second one."""
    return sorted({int(point.partition(",")[2]) for point in sweep.points})


def half_gain(sweep: Sweep, seeds: Sequence[int], objective: str) -> str:
    """At which S the mean gain falls below half of that at the smallest, which must be at most `FRESH`.

    Interpolated between two S on a log scale.
    """
    gains: list[tuple[int, float]] = []
    for size in sizes_of(sweep):
        point = f"{objective},{size}"
        found = estimate(sweep, seeds, difference(last(point), at(point, 0)))
        if found is not None:
            gains.append((size, found.mean))
    if len(gains) < 2 or gains[0][0] > FRESH:
        return "not run"
    half = gains[0][1] / 2
    for (small, before), (large, after) in itertools.pairwise(gains):
        if after < half:
            return f"{small * (large / small) ** ((before - half) / (before - after)):.0f}"
    return f"above {gains[-1][0]}"


def _staleness(name: str, sweep: Sweep) -> list[str]:
    objectives = list(dict.fromkeys(point.partition(",")[0] for point in sweep.points))
    sizes = sizes_of(sweep)
    rows = [
        [f"`{objective}`"]
        + [_text(estimate(sweep, sweep.seeds, last(f"{objective},{size}"))) for size in sizes]
        + [half_gain(sweep, seeds, objective) for seeds in SETS]
        for objective in objectives
    ]
    head = ["objective", *(f"S = {size}" for size in sizes), "half of the gain is lost at (seeds 0 to 4)", "(5 to 9)"]
    behind = [
        [f"`{objective}`"]
        + [
            _text(estimate(sweep, sweep.seeds, difference(last(f"{objective},{size}"), last(f"grpo,{size}"))), "+")
            for size in sizes
        ]
        for objective in objectives
        if objective != "grpo"
    ]
    return [
        f"## Accuracy at the end, in stages of S: `lab/{name}.toml`",
        f"Seeds {sweep.seeds[0]} to {sweep.seeds[-1]}, where they were run; {max(sizes)} updates each.",
        _table(head, rows),
        "Less `grpo` with the same S:",
        _table(head[: len(sizes) + 1], behind),
    ]


def _plain(name: str, sweep: Sweep) -> list[str]:
    """Of any sweep, whose last axis is the objective."""

    def cell(value: Value, sign: str = "") -> str:
        found = [x for seed in sweep.seeds if (x := value(sweep, seed)) is not None]
        return f"{found[0]:{sign}.3f}" if len(found) == 1 else _text(estimate(sweep, sweep.seeds, value), sign)

    first = sweep.points[0].rpartition(",")[0]
    rows = []
    for point in sweep.points:
        seeds = [seed for seed in sweep.seeds if sweep.curve(point, seed, "accuracy")]
        setting, comma, objective = point.rpartition(",")
        others = [f"{setting}{comma}grpo", f"{first}{comma}{objective}" if comma else point]
        less = [cell(difference(last(point), last(other)), "+") if other != point else "-" for other in others]
        rows.append([f"`{point}`", str(len(seeds)), *map(cell, (at(point, 0), at(point, EARLY), last(point))), *less])
    head = ["point", "seeds", "before", f"update {EARLY}", "at the end", "less `grpo`"]
    head.append(f"less `{first}`")
    used = [place for place in range(len(head)) if any(row[place] != "-" for row in rows)]
    table = _table([head[place] for place in used], [[row[place] for place in used] for row in rows])
    return [f"## Accuracy: `lab/{name}.toml`", table]


# ------------------------------------------------------------------------------------------------------------ time


def _times(sweeps: Mapping[str, Sweep]) -> list[str]:
    """By sweep, and where stages differ by S, over its runs."""
    rows: Rows = []
    for name, sweep in sweeps.items():
        groups: dict[str, list[dict[str, float]]] = {}
        for (point, _), run in sweep.seconds.items():
            label = f", S = {point.partition(',')[2]}" if name in STALENESS else ""
            groups.setdefault(f"`lab/{name}.toml`{label}", []).append(run)
        for label, runs in groups.items():
            phases = [[run[phase] for run in runs] for phase in ("rollout", "optimize", "evaluate", "live")]
            update = [run["optimize"] / run["updates"] for run in runs]
            cells = [f"{sum(s) / len(s):.1f} ({min(s):.1f})" if any(s) else "-" for s in phases]
            cells.append(f"{sum(update) / len(update):.3f} ({min(update):.3f})")
            rows.append([label, str(len(runs)), f"{sum(run['updates'] for run in runs) / len(runs):.0f}", *cells])
    head = ["runs of", "finished", "updates", "rollout", "optimize", "evaluate", "live", "optimize / updates"]
    return ["## Seconds of a run's phases: mean (smallest)", _table(head, rows)]
