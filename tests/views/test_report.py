"""The report: its summary, its charts, what it shows if files are missing or damaged, of branches, and of a run that
learns nothing, which is said on the screen, too."""

import json
import math
import re

import pytest

from megarl.errors import UserError
from megarl.recipe.tables import RunTable
from megarl.storage.checked_json import append_json
from megarl.storage.metrics import NOTHING, UPDATES, MetricsWriter, find
from megarl.storage.run_dir import RunDir
from megarl.views.report import short_names, summary, write_report
from megarl.views.report.charts import POINTS, make_charts
from megarl.views.report.pairs import equal_updates
from megarl.views.run_reader import read_run
from tests.helpers import events, five_letters, megarl, read_lines, refused, write_recipe
from tests.phases.commands import settings, succeed, train
from tests.views.synthetic_run import change_lines, make_branch, make_recipe, make_run, write_lines


@pytest.fixture
def root(tmp_path):
    return make_run(tmp_path / "a")


def charts_of(*roots):
    names = short_names(list(roots))
    return {c.title: c for c in make_charts([read_run(r, n) for r, n in zip(roots, names, strict=True)])}


def test_summary(root):
    row = summary(read_run(root, "a"))
    half = [1.96 * math.sqrt(p * (1 - p) / 1024) for p in (0.281, 0.902)]
    assert row == {
        "Run": "a",
        "Objective": "mu_grpo",
        "Base accuracy": f"0.281 ± {half[0]:.3f}",
        "Final accuracy": f"0.902 ± {half[1]:.3f}",
        "Gain (95 %)": "+0.621",  # no responses are stored that would give an interval
        "Best accuracy": f"0.902 ± {half[1]:.3f} (update 288)",
        "Updates": "288 / 288",
        "Largest staleness": "95",
        "Time in phases": "1 min 40 s",
        "Tokens trained on": "288,000",
    }
    recipe = root / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('name = "mu_grpo"', 'path = "/home/me/soft.py:SoftPrefix"'))
    assert summary(read_run(root, "a"))["Objective"] == "soft.py:SoftPrefix"


def test_runs_are_compared_on_a_suite_that_all_have(root, tmp_path):
    other = make_run(tmp_path / "b")
    change_lines(other / "events.jsonl", lambda record: record | {"suite": "own"} if "suite" in record else record)
    runs = [read_run(path, path.name) for path in (root, other)]
    assert equal_updates(runs) == []
    append_json(other / "events.jsonl", runs[0].suites["heldout"][-1])
    assert equal_updates([runs[0], read_run(other, "b")]) == [288]


def test_idle_times_of_a_live_run_are_shown(root):
    recipe = root / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('kind = "staged"', 'kind = "live"'))
    waits = {"idle_seconds": 0.025, "seconds": 0.1, "staleness/mean": 2.5}
    change_lines(root / "metrics.jsonl", lambda record: record | waits)
    for seconds in (1.0, 3.0):
        idle = {"event": "idle", "role": "rollout", "seconds": 5.0, "idle_seconds": seconds}
        append_json(root / "events.jsonl", idle)
    row = summary(read_run(root, "a"))
    assert (row["Mean staleness"], row["Trainers idle"], row["Engines idle"]) == ("2.5", "25.0%", "40.0%")


def test_traces_of_every_chart(root):
    charts = charts_of(root)
    empty = {title for title, chart in charts.items() if not chart.traces}
    experts = {"Load of experts", "Entropy of the routers", "Experts that differ from the recorded ones"}
    assert empty == {"pass@k", *experts} and len(charts) == 24
    assert [t["name"] for t in charts["Importance ratio quantiles"].traces] == ["q01", "q99", "q05", "q95", "median"]
    assert [t["name"] for t in charts["Clipped, vetoed and masked tokens"].traces] == ["clip", "veto"]
    (trace,) = charts["Held-out accuracy"].traces
    assert (trace["x"], trace["y"]) == ([0, 96, 192, 288], [0.281, 0.613, 0.815, 0.902])
    assert trace["error_y"]["array"][0] == pytest.approx(1.96 * math.sqrt(0.281 * 0.719 / 1024))
    assert trace["error_y"]["arrayminus"][0] == pytest.approx(trace["error_y"]["array"][0])
    ess = charts["Effective sample size"].traces[0]["y"]
    assert ess[95] == pytest.approx(1 / (1 + (0.02 + 0.5 * 95 / 96) ** 2), rel=1e-5)
    assert [t["y"] for t in charts["Time per phase"].traces] == [[11, 12, 13], [17, 16, 15], [4, 4, 4, 4]]
    assert len([s for s in charts["Entropy"].layout["shapes"] if s["type"] == "line"]) == 2
    assert all(chart.hint.endswith(".") for chart in charts.values())


def test_several_runs_are_overlaid_and_their_recipes_compared(tmp_path):
    assert short_names([tmp_path / "x/run", tmp_path / "y/run"]) == ["x/run", "y/run"]
    assert short_names([tmp_path / "x/run", tmp_path / "y/walk"]) == ["run", "walk"]
    other = make_recipe(name="grpo", veto_threshold=None, eps_low=0.2)
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1, gain=0.5, recipe=other)
    charts = charts_of(a, b)
    assert [t["name"] for t in charts["Held-out accuracy"].traces] == ["a", "b"]
    clipped = charts["Clipped, vetoed and masked tokens"].traces
    assert [t["name"] for t in clipped] == ["a clip", "a veto", "b clip", "b veto"]
    assert len({t["line"]["color"] for t in charts["Entropy"].traces}) == 2
    page = write_report([a, b], tmp_path / "r.html").read_text()
    settings = re.search(r'<table id="settings">.*?</table>', page, re.S)[0]
    rows = re.findall(r"<tr><th>([^<]*)</th><td>(.*?)</td><td>(.*?)</td></tr>", settings)
    named = ("objective.name", "&quot;mu_grpo&quot;", "&quot;grpo&quot;")
    assert rows == [("objective.eps_low", "-", "0.2"), named, ("objective.veto_threshold", "0.001", "-")]


def test_a_report_stays_small_however_long_the_run(tmp_path):
    stages = 1100
    recipe = make_recipe({"stages": stages, "updates_per_stage": 2})
    roots = [make_run(tmp_path / name, recipe=recipe) for name in "ab"]
    for each in roots:
        change_lines(each / "metrics.jsonl", lambda record: record | {"entropy": record["update"] % 2})
    assert write_report(roots, tmp_path / "page.html").stat().st_size < 3 << 20
    charts = charts_of(*roots)
    traces = [trace for chart in charts.values() for trace in chart.traces]
    assert max(len(trace["y"]) for trace in traces) <= POINTS
    assert not any(chart.layout.get("shapes") for chart in charts.values())
    entropy = charts["Entropy"].traces[0]["y"]
    assert sum(entropy) / len(entropy) == pytest.approx(0.5, abs=1e-2), "averaged in bins"
    (accuracy, *_), bars = charts["Held-out accuracy"].traces, charts["Time per phase"].traces
    assert accuracy["x"][0] == 0 and accuracy["x"][-1] == 2 * stages
    total = sum(sum(trace["y"]) for trace in bars) / len(roots)
    assert total == pytest.approx(32 * stages + 4)  # seconds: see `make_events`
    assert bars[0]["x"] == [["a", "b"], ["all stages"] * 2]


def test_a_run_that_has_just_begun_gives_a_page(root, tmp_path):
    (root / "metrics.jsonl").unlink()
    (root / "events.jsonl").unlink()
    absent, unevaluated = [f"{name}.jsonl is not there yet" for name in ("metrics", "events")], "no evaluation has been"
    assert read_run(root, "a").notes == [*absent, f"{unevaluated} made yet", "not finished: 0 of 288 updates"]
    recipe = root / "recipe.toml"
    recipe.write_text(re.sub(r"(?m)^every = \d+", "every = 0", recipe.read_text()))
    assert unevaluated not in str(read_run(root, "a").notes)
    page = write_report([root], tmp_path / "r.html").read_text()
    assert "The recipe turns evaluation off" in page and "No update has been made yet." in page
    assert summary(read_run(root, "a"))["Gain (95 %)"] == "-"


def test_damaged_lines_and_values_that_are_no_numbers_are_left_out(root, tmp_path):
    lines = (root / "metrics.jsonl").read_text().splitlines()
    lines[10] = lines[10][:30]
    lines[200] = '{"update": 201, "entropy": NaN, "grad_norm": "big", "reward/mean": null, "loss": Infinity}'
    (root / "metrics.jsonl").write_text("\n".join(lines[:201]) + '\n{"update": 202, "sta')
    said = ["metrics.jsonl: left out 2 lines that could not be read", "not finished: 200 of 288 updates"]
    assert read_run(root, "a").notes == said
    charts = charts_of(root)
    assert len(charts["Entropy"].traces[0]["x"]) == len(charts["Gradient norm"].traces[0]["x"]) == 199
    write_report([root], tmp_path / "r.html")


def test_strings_from_files_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    root = make_run(tmp_path / "<b>x<b>", recipe=make_recipe(name=evil))
    append_json(root / "events.jsonl", {"event": "phase_end", "stage": 0, "phase": f"</script>{evil}", "seconds": 1})
    of_evil = {"event": "evaluation", "update": 288, "suite": "heldout", "accuracy": 1, "ci95": [1, 1]}
    append_json(root / "events.jsonl", of_evil | {"prompts": f"</script>{evil}"})
    page = write_report([root], tmp_path / "r.html").read_text()
    assert evil not in page and "<b>x<b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    drawn = repr([chart.traces for chart in charts_of(root, make_run(tmp_path / "<a href='x'>")).values()])
    assert "&lt;a href" in drawn, "Plotly takes some markup in names for its own"
    assert "<a " not in drawn and "<b>x" not in drawn and "<script" not in drawn


def test_a_report_lies_in_its_run_and_one_of_several_runs_where_it_is_asked_for(root, tmp_path):
    assert megarl("report", root).stdout.strip() == f"{root}/report.html" and (root / "report.html").exists()
    assert "several runs needs --output" in refused("report", root, make_run(tmp_path / "b"))


def test_invalid_run_directories_and_outputs_are_refused(root, tmp_path):
    (tmp_path / "empty").mkdir()
    for recipe, said in (
        (None, "empty is not a run directory: it has no recipe.toml"),
        ("[schedule]\nstages = 'many'\n", r"not a resolved recipe: schedule\.stages is 'many'"),
        ("[schedule", r"cannot read .*recipe\.toml"),
    ):
        if recipe:
            (tmp_path / "empty/recipe.toml").write_text(recipe)
        with pytest.raises(UserError, match=said):
            write_report([tmp_path / "empty"], tmp_path / "r.html")
    with pytest.raises(UserError, match="is a directory"):
        write_report([root], tmp_path)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(("stage", "base", "final"), [(0, "0.281", "0.613"), (1, "0.613", "0.815")])
def test_a_branch_is_finished_after_its_stage(tmp_path, stage, base, final):
    whole = make_run(tmp_path / "whole")
    run = read_run(make_branch(tmp_path / "branch", whole, stage), "branch")
    row = summary(run)
    assert (run.notes, row["Updates"]) == ([], "96 / 96")
    assert row["Base accuracy"].startswith(base) and row["Final accuracy"].startswith(final)
    write_lines(run.root / "metrics.jsonl", run.updates[:-1])
    assert read_run(run.root, "branch").notes == ["not finished: 95 of 96 updates"]


GOOD = {"reward/mean": 0.5, "zero_variance_fraction": 0.5, "grad_norm": 0.1, "entropy": 1.0, "ess": 0.9}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"zero_variance_fraction": 1.0, "reward/mean": 0.0}, "equal_rewards"),
        ({"grad_norm": 0.0}, "no_gradient"),
        ({"entropy": 1e-4}, "no_entropy"),
        ({"ess": 0.01}, "no_sample"),
    ],
)
def test_a_cause_is_found_only_if_every_update_shows_it(values, kind):
    records = [GOOD | values for _ in range(UPDATES)]
    assert list(find(records)) == [kind]
    records = [record | {"reward/mean": 0.1 * n} for n, record in enumerate(records)]
    assert list(find(records)) == ["no_variance" if kind == "equal_rewards" else kind]
    for record in (GOOD, {"skipped_update": 1.0}):
        assert find([*records[1:], record]) == {}


def test_a_cause_is_logged_once_per_stage(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", NOTHING, b"", 0, RunTable(tensorboard=False))
    for update in range(1, 4 * UPDATES + 1):
        writer.append({"update": update, "stage": (update - 1) // (2 * UPDATES)} | GOOD | {"ess": 0.001})
    found = [(event["stage"], event["first"], event["update"]) for event in read_lines(tmp_path / "events.jsonl")]
    assert found == [(0, 1, UPDATES), (1, UPDATES + 2, 2 * UPDATES + 1)]


def test_a_run_that_learns_nothing_says_so(tiny_model, tmp_path):
    """The untrained model never answers with the letter that is asked for."""
    recipe = write_recipe(tmp_path, tiny_model, five_letters())
    wanted = (f"schedule.updates_per_stage={UPDATES}", "schedule.prompts_per_update=2")
    result = train(recipe, tmp_path / "run", *settings("schedule.stages=1", "eval.every=0", *wanted))
    run = RunDir.open(tmp_path / "run")
    said = f"learns nothing, updates 1 to {UPDATES}: the responses to each prompt had equal rewards, 0 on average in"
    assert said in result.stdout + result.stderr
    assert [event["kind"] for event in events(run, "learns_nothing")] == ["equal_rewards"]
    notes = (run.root / "report.html").read_text().partition('<ul class="notes">')[2].partition("</ul>")[0]
    assert said in notes
    assert json.dumps(read_run(run.root, "run").notes).count("learns nothing") == 1


def test_the_last_line_and_the_report_have_the_paired_interval_of_compare(recipe, tmp_path):
    root = tmp_path / "run"
    wanted = ("schedule.stages=1", "schedule.updates_per_stage=4", "optimizer.lr=0.01", "run.seed=1")
    said = train(recipe, root, *settings(*wanted))
    (compared,) = json.loads(succeed("compare", f"{root}:0", f"{root}:4", "--json").stdout)
    estimate = compared["estimates"][0]
    low, high = estimate["ci95"]
    text = f"{estimate['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert f": {text} (95 %, paired over 16 prompts)" in said.stdout
    assert text in (root / "report.html").read_text()
