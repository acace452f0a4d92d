"""docs/papers.md is up to date and complete, and everything that it refers to exists."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from megarl.objectives import OBJECTIVES
from megarl.recipe.tables import Recipe
from tests.helpers import ROOT
from tools import papers_table as table

PAPERS = table.papers()
ROWS = [row for paper in PAPERS for row in paper["rows"]]
SOURCES = "\n".join(path.read_text() for path in (ROOT / "megarl").rglob("*.py"))
README = (ROOT / "examples/README.md").read_text()


def problem(where: str) -> str | None:
    """Why the reference ``where`` of a row is wrong; None if it is right."""
    kind, _, name = where.partition(":")
    if kind == "file":
        path, _, symbol = name.partition(":")
        if not (ROOT / path).is_file():
            return "no such file"
        return None if re.search(rf"\b{symbol}\b", (ROOT / path).read_text()) else "not in the file"
    if kind == "key":
        table_name, _, key = name.partition(".")
        known: set[str] = set(Recipe.model_fields[table_name].annotation.model_fields)  # type: ignore[union-attr]
        if table_name == "objective":
            known |= {field.name for objective in OBJECTIVES.values() for field in fields(objective)}
        return None if key in known else "no such key"
    if kind == "row":
        return None if f"| {name} | `megarl " in README else "no such row"
    if kind == "chart":
        return None if f'"{name}"' in SOURCES else "no such chart"
    return metric_problem(name) if kind == "metric" else "what is this?"


def metric_problem(name: str) -> str | None:
    """A metric's name is in the code as it is, or as parts of an f-string: quantiles, signs, kinds of prefixes."""
    stems = [name, re.sub(r"/(q\d\d|positive|negative|good_prefix|bad_prefix|selectivity)$", "", name)]
    if re.sub(r"/q\d\d$", "", name) != name or name.startswith(("dampen/", "response_tokens/", "bapo/")):
        stems.append(stems[1].rpartition("/")[2])
    return None if any(f'"{stem}"' in SOURCES or f'"{stem}/' in SOURCES for stem in stems) else "no such metric"


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/papers.md").read_text() == table.render(PAPERS), "run: python tools/papers_table.py"


def test_everything_that_a_row_refers_to_exists() -> None:
    for row in ROWS:
        assert {"item", "where"} <= row.keys() <= {"item", "where", "why"} and row["where"]
        found = [f"{where}: {wrong}" for where in row["where"] if (wrong := problem(where))]
        assert found == [], row["item"]
    assert problem("metric:gone/q01") and problem("file:megarl/objectives/m2po.py:Gone")


def test_each_item_has_values_and_says_why_where_its_label_is_not_exact() -> None:
    assert [row["item"] for row in ROWS] == list(table.values())
    labels = {row["item"]: table.label(row["item"]) for row in ROWS}
    assert {item for item, label in labels.items() if label != "exact"} == {r["item"] for r in ROWS if r.get("why")}
    assert set(labels.values()) == {"exact", "deviates", "absent", "outside"}


KINDS = ({"row", "key", "value"}, {"row", "key", "absent"}, {"value", "ours"}, {"test"}, {"shown"}, {"result"})


def test_values_are_well_formed_and_what_they_name_exists() -> None:
    for value in (value for values in table.values().values() for value in values):
        assert value.keys() - {"line", "source", "model"} in KINDS and value.keys() & {"line", "source"}, value
        for name in value.get("shown", ()):
            assert problem(name) is None
        if test := value.get("test"):  # an objective as the tests have it from the papers, or one test
            path, _, function = test.rpartition("::")
            source = (ROOT / (path or "tests/objectives/papers.py")).read_text()
            assert f"def {function}(" in source
        if "row" in value:
            table.resolved(value)


def test_a_label_follows_from_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"line": 225, "row": "figure 8, table 2: BAPO", "key": "objective.positive_target", "value": 0.4}
    other = {**value, "value": 0.45}
    for found, label in (([value], "exact"), ([value, other], "deviates"), ([{**value, "absent": True}], "absent")):
        monkeypatch.setattr(table, "values", lambda found=found: {"item": found})
        assert table.label("item") == label
