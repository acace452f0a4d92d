"""docs/papers.md is up to date and complete, and everything that it refers to exists."""

from __future__ import annotations

import re
from dataclasses import fields

from megarl.objectives import OBJECTIVES
from megarl.recipe.tables import Recipe
from tests.helpers import ROOT
from tools import papers_table as table

PAPERS = table.papers()
ROWS = [row for paper in PAPERS for row in paper["rows"]]
SOURCES = "\n".join(path.read_text() for path in (ROOT / "megarl").rglob("*.py"))
README = (ROOT / "examples/README.md").read_text()


def is_there(where: str) -> bool:
    kind, _, name = where.partition(":")
    if kind == "file":
        path, _, symbol = name.partition(":")
        return (ROOT / path).is_file() and re.search(rf"\b{symbol}\b", (ROOT / path).read_text()) is not None
    if kind == "key":
        table_name, _, key = name.partition(".")
        known: set[str] = set(Recipe.model_fields[table_name].annotation.model_fields)  # type: ignore[union-attr]
        if table_name == "objective":
            known |= {field.name for objective in OBJECTIVES.values() for field in fields(objective)}
        return key in known
    if kind == "row":
        return f"| {name} | `megarl " in README
    return f'"{name}"' in SOURCES if kind == "chart" else kind == "metric" and is_metric(name)


def is_metric(name: str) -> bool:
    stems = [name, re.sub(r"/(q\d\d|positive|negative|good_prefix|bad_prefix|selectivity)$", "", name)]
    if re.search(r"/q\d\d$", name) or name.startswith(("dampen/", "response_tokens/", "bapo/")):
        stems.append(stems[1].rpartition("/")[2])
    return any(f'"{stem}"' in SOURCES or f'"{stem}/' in SOURCES for stem in stems)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/papers.md").read_text() == table.render(PAPERS), "run: python tools/papers_table.py"


def test_everything_that_a_row_refers_to_exists() -> None:
    for row in ROWS:
        assert {"item", "where"} <= row.keys() <= {"item", "where", "why"} and row["where"]
        assert [where for where in row["where"] if not is_there(where)] == [], row["item"]
    assert not is_there("metric:gone/q01") and not is_there("file:megarl/objectives/m2po.py:Gone")


def test_each_item_has_values_and_says_why_where_its_label_is_not_exact() -> None:
    assert [row["item"] for row in ROWS] == list(table.values())
    labels = {row["item"]: table.label(row["item"]) for row in ROWS}
    assert {item for item, label in labels.items() if label != "exact"} == {r["item"] for r in ROWS if r.get("why")}
    assert set(labels.values()) == {"exact", "deviates", "absent", "outside"}


def test_what_values_name_exists() -> None:
    for value in (value for values in table.values().values() for value in values):
        assert all(map(is_there, value.get("shown", ())))
        if test := value.get("test"):  # an objective as the tests have it from the papers, or one test
            path, _, function = test.rpartition("::")
            source = (ROOT / (path or "tests/objectives/papers.py")).read_text()
            assert f"def {function}(" in source
        if "row" in value:
            table.resolved(value)
