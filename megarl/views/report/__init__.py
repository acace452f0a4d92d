"""One self-contained HTML page about one run or several side by side: `write_report`."""

from __future__ import annotations

import html
import json
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.checked_json import Record
from megarl.storage.files import write_atomic
from megarl.views.comparison import difference
from megarl.views.report.charts import make_charts
from megarl.views.report.pages import colour, page, table
from megarl.views.run_reader import Run, half_width, read_run


def write_report(run_dirs: list[Path], output: Path) -> Path:
    """Write the page about ``run_dirs`` to ``output``, which is returned; `UserError` if one is not a run directory."""
    runs = [read_run(Path(path), name) for path, name in zip(run_dirs, short_names(run_dirs), strict=True)]
    if output.is_dir():
        raise UserError(f"cannot write the report: {output} is a directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, render(runs))
    return output


def short_names(run_dirs: list[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell the paths apart."""
    paths = [Path(path).resolve() for path in run_dirs]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def render(runs: list[Run]) -> str:
    """The page as HTML text."""
    notes = [(run.name, note) for run in runs for note in run.notes]
    recipes = "".join(
        f"<details{' open' * (len(runs) == 1)}><summary>{html.escape(run.name)}/recipe.toml</summary>"
        f"<pre>{html.escape(run.recipe)}</pre></details>"
        for run in runs
    )
    return page(
        title=html.escape(", ".join(run.name for run in runs)),
        notes="".join(f"<li><b>{html.escape(name)}</b>: {html.escape(note)}</li>" for name, note in notes),
        summary=_summary_table(runs),
        charts=make_charts(runs),
        below=f"<h3>Recipe</h3>\n{_settings_table(runs)}\n{recipes}",
    )


def _summary_table(runs: list[Run]) -> str:
    rows = [summary(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[html.escape(row.get(name, "-")) for name in columns] for row in rows]
    if len(runs) > 1:
        cells = [[f'<i style="background:{colour(n)}"></i>{first}', *rest] for n, (first, *rest) in enumerate(cells)]
    return table("summary", map(html.escape, columns), cells)


def _settings_table(runs: list[Run]) -> str:
    """The settings in which the runs differ."""
    if len(runs) < 2:
        return ""
    keys = sorted({key for run in runs for key in run.settings})
    differing = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    if not differing:
        return "<p>The runs have the same recipe.</p>"
    rows = [
        [key, *(json.dumps(run.settings[key], default=str) if key in run.settings else "-" for run in runs)]
        for key in differing
    ]
    return table(
        "settings",
        ["Setting", *(html.escape(run.name) for run in runs)],
        ([html.escape(cell) for cell in row] for row in rows),
    )


def summary(run: Run) -> dict[str, str]:
    """The cells of a run's row in the table at the top."""
    evaluations = run.evaluations
    base = evaluations[0] if evaluations and evaluations[0]["update"] == run.begins else None
    final = evaluations[-1] if len(evaluations) > 1 else None
    gain = "-"
    if base and final:
        try:
            suite = next(iter(run.suites))
            gain = difference(run.root, base["update"], run.root, final["update"], suite).text()
        except UserError:  # without the stored responses there is no interval
            gain = f"{final['accuracy'] - base['accuracy']:+.3f}"
    ages = run.column("staleness")[1]
    tokens = sum(run.column("trained_tokens")[1])
    seconds, discarded = sum(run.phase_seconds.values()), sum(run.column("discarded_responses")[1])
    return {
        "Run": run.name,
        "Objective": _objective(run),
        "Base accuracy": _estimate(base),
        "Final accuracy": _estimate(final),
        "Gain (95 %)": gain,
        **_best(evaluations),
        "Updates": f"{len(run.updates):,} / {run.last - run.begins:,}",
        "Largest staleness": f"{max(ages):,.0f}" if ages else "-",
        "Time in phases": _clock(seconds) if seconds else "-",
        "Tokens trained on": f"{tokens:,.0f}" if tokens else "-",
        **({"Faulty responses generated again": f"{discarded:,.0f}"} if discarded else {}),
    }


def _objective(run: Run) -> str:
    """The name of the objective, or its file and class without the folders."""
    path = run.settings.get("objective.path")
    return Path(path).name if path else str(run.settings.get("objective.name", "-"))


def _best(evaluations: list[Record]) -> dict[str, str]:
    """The cell with the highest accuracy (of equal ones the earliest), for runs with three evaluations or more."""
    if len(evaluations) < 3:
        return {}
    best = max(evaluations, key=lambda event: event["accuracy"])
    return {"Best accuracy": f"{_estimate(best)} (update {best['update']:,})"}


def _estimate(event: Record | None) -> str:
    return f"{event['accuracy']:.3f} ± {half_width(event):.3f}" if event else "-"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
