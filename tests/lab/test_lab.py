"""The lab: its sweeps can run, its committed figures show the committed results, and verdicts are right."""

import math
import re

import numpy as np
import pytest

from lab.claims import FIRST, SECOND, Part, collapse, find, lead, verdict
from lab.collect import joined
from lab.figures import charts
from lab.results import Sweep, at, difference
from lab.tables import read_all
from megarl.commands.sweep import describe
from tests.helpers import ROOT


@pytest.mark.parametrize("path", sorted(ROOT.glob("lab/*.toml")), ids=lambda path: path.stem)
def test_every_sweep_of_the_lab_passes_its_dry_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert " runs (" in describe(path, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_committed_charts_show_the_committed_results(monkeypatch):
    """The heights of the points in an SVG are a linear function of the values, up to rounding to .01 pixels."""
    monkeypatch.chdir(ROOT)
    found = charts(read_all())
    assert set(found) == {path.stem for path in ROOT.glob("docs/lab/*.svg")}
    for name, chart in found.items():
        svg = (ROOT / f"docs/lab/{name}.svg").read_text()
        heights = [float(y) for y in re.findall(r'class="point" transform="translate\(.*?,(.*?)\)', svg)]
        values = np.array([y for trace in chart.traces for y in trace["y"]])
        assert len(heights) == len(values), name
        line = np.polynomial.Polynomial.fit(values, heights, 1)
        assert heights == pytest.approx(line(values), abs=0.05), f"{name}: run `python -m lab.figures`"


def test_runs_of_further_seeds_are_collected_beside_the_others():
    kept, new = "point,seed,update\na,0,1\na,1,1\nb,1,1\n", "point,seed,update\na,1,2\n"
    assert joined(kept, new) == "point,seed,update\na,0,1\na,1,2\n"


def sweep_of(**finals):
    accuracy = {(point, seed): {0: 0.1, 256: x} for point, xs in finals.items() for seed, x in enumerate(xs)}
    return {"frozen": Sweep(accuracy)}


# accuracies of five seeds: of a point to compare with, clearly above it, equal within noise, and too noisy to tell
A = [0.50, 0.52, 0.54, 0.56, 0.58]
ABOVE = [x + 0.10 + 0.01 * (i % 2) for i, x in enumerate(A)]
NEAR = [x + 0.01 * (-1) ** i for i, x in enumerate(A)]
WILD = [x + 0.30 * (-1) ** i for i, x in enumerate(A)]


@pytest.mark.parametrize(
    ("first", "side", "state"),
    [
        (ABOVE, "above", "holds"),
        (ABOVE, "below", "opposite"),
        (NEAR, "above", "open"),
        (NEAR, "equal", "holds"),
        (WILD, "equal", "open"),
        (ABOVE[:4], "above", "not run"),
    ],
)
def test_a_part_holds_if_its_whole_interval_is_on_its_side(first, side, state):
    part = Part("", difference(at("x", 256), at("y", 256)), side)
    assert find(part, sweep_of(x=first, y=A), FIRST).state == state


@pytest.mark.parametrize(
    ("sides", "word"), [("above above", "reproduced"), ("above below", "partly"), ("below below", "not reproduced")]
)
def test_a_verdict_follows_from_all_parts(sides, word):
    value = difference(at("x", 256), at("y", 256))
    parts = [Part("", value, side) for side in sides.split()]
    for first, expected in ((ABOVE, word), (NEAR, "cannot be seen at this size"), (ABOVE[:3], "not run")):
        assert verdict([find(part, sweep_of(x=first, y=A), FIRST) for part in parts]) == expected


def test_a_collapse_and_its_warning_by_hand():
    sweep = Sweep(
        {("x", 0): {0: 0.3, 32: 0.6, 64: 0.5, 96: 0.29, 128: 0.7}, ("x", 1): {0: 0.3, 32: 0.6, 64: 0.4}},
        {("x", 0, "ess"): {8: 0.9, 16: 0.6, 24: 0.4, 32: 0.7}},
    )
    assert collapse(sweep, "x", 0) == 64  # the evaluation before the first one below .3, half of the best
    assert collapse(sweep, "x", 1) is None
    assert lead(["x"], 0.5)(sweep, 0) == 64 - 24
    assert math.isnan(lead(["x"], 0.2)(sweep, 0))
    assert math.isnan(lead(["x"], 0.5)(sweep, 1))  # the run exists, but did not collapse
    assert lead(["x"], 0.5)(sweep, 2) is None
    sweep.accuracy["y", 0], sweep.metrics["y", 0, "ess"] = {0: 0.3, 32: 0.1}, {8: 0.4}
    assert lead(["x", "y"], 0.5, least=10)(sweep, 0) == (64 - 24 + 0 - 8) / 2 - 10


def test_a_part_does_not_count_for_seeds_that_were_seen_before_it_was_written():
    value = difference(at("x", 256), at("y", 256))
    parts = [Part("", value), Part("", value, "below", seen=FIRST)]
    sweeps = sweep_of(x=ABOVE * 2, y=A * 2)
    assert verdict([find(part, sweeps, FIRST) for part in parts]) == "reproduced"
    assert verdict([find(part, sweeps, SECOND) for part in parts]) == "partly"
