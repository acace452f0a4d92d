"""The gain of a run, on the screen and in the report, is that of `megarl compare`; reports without one say why."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.views.report import render
from megarl.views.run_reader import read_run
from tests.helpers import megarl
from tests.views.synthetic_run import make_run, write_lines


def test_the_last_line_and_the_report_have_the_paired_interval_of_compare(recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    settings = ("schedule.stages=1", "schedule.updates_per_stage=4", "optimizer.lr=0.01", "run.seed=1")
    said = megarl("train", recipe, "--run-dir", root, *(part for text in settings for part in ("--set", text)))
    (compared,) = json.loads(megarl("compare", f"{root}:0", f"{root}:4", "--json").stdout)
    estimate = compared["estimates"][0]
    low, high = estimate["ci95"]
    text = f"{estimate['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert f": {text} (95 %, paired over 16 prompts)" in said.stdout
    assert text in (root / "report.html").read_text()


def test_a_report_without_a_common_update_says_so_and_draws_no_empty_chart(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    lines = [json.loads(line) for line in (b / "events.jsonl").read_text().splitlines()]
    write_lines(b / "events.jsonl", [line for line in lines if line["event"] != "evaluation" or line["stage"] == 0])
    page = render([read_run(a, "a"), read_run(b, "b")])
    assert "were never evaluated after the same number of updates" in page
    assert "Held-out accuracy minus that of a" not in page
    same = render([read_run(a, "a"), read_run(make_run(tmp_path / "c"), "c")])
    assert "other prompts, or their responses are gone" in same
