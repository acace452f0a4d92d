"""Reads prompt files (JSON lines, JSON, CSV, Parquet) and brings their columns to a common form."""

from __future__ import annotations

import csv
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.data.formats import FORMATS, Format
from megarl.data.values import answer_of, parse, prompt_of, without_null
from megarl.errors import UserError, did_you_mean
from megarl.foreign import quoted
from megarl.recipe.data_table import FILES, SourceTable

_REST = "(without a column)"
_SMALL = {"halffloat": "float16", "float": "float32"}  # Arrow's names of types of numbers, and NumPy's
LONGEST_CELL = 16 << 20  # characters of a .csv file
# {"question": str | chat messages, "answer": str, "metadata": dict}, reasoning-gym's form; of the file of a suite also
# "exam": True, and then the answer may be ""
Item = dict[str, Any]
# (where, row, or what is wrong with the line): where names file and line for error messages
Rows = Iterator[tuple[str, Any]]


def read_rows(table: SourceTable, exam: bool = False) -> list[tuple[str, Item]]:
    """(where, item) of every row of a file; `UserError` for the first row that is not a valid prompt.

    exam: of a suite, in which published files lack some answers; all responses to such a row count as wrong.
    """
    found = []
    for where, item in scan_rows(table, exam):
        if isinstance(item, UserError):
            raise item
        found.append((where, item))
    if not found:
        raise UserError(f"{table.train} contains no prompts")
    return found


def scan_rows(table: SourceTable, exam: bool = False) -> Iterator[tuple[str, Item | UserError]]:
    """As `read_rows`, but yield the `UserError` of an invalid row instead of raising it.

    Raises `UserError` only if the file itself cannot be read.
    """
    path, name = Path(table.train), table.format
    if name is not None and name not in FORMATS:
        raise UserError(f"data.format = {name!r}: unknown; {did_you_mean(name, FORMATS)}")
    form = FORMATS[name] if name else None
    if path.suffix not in FILES:
        packed = f"; unpack it: gunzip -k {quoted(path)}" if path.suffix == ".gz" else ""
        raise UserError(f"{path}: the name of a prompt file must end in {', '.join(FILES[:-1])} or {FILES[-1]}{packed}")
    if not path.is_file():
        raise UserError(f"there is no prompt file {path}")
    reader = dict(zip(FILES, (_read_jsonl, _read_json, _read_csv, _read_parquet), strict=True))[path.suffix]
    try:
        for where, row in reader(path, form):
            try:
                yield where, _item_of_row(_renamed(row, table, form, where), where, exam)
            except UserError as error:
                yield where, error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _read_jsonl(path: Path, form: Format | None) -> Rows:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                if line.strip():
                    yield where, parse(line)
            except ValueError as error:
                yield where, UserError(f"{where} is not JSON: {error}")


def _read_json(path: Path, form: Format | None) -> Rows:
    try:
        rows = parse(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _read_csv(path: Path, form: Format | None) -> Rows:
    csv.field_size_limit(LONGEST_CELL)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey=_REST, strict=True)
            rows: list[Any] = list(reader)
            names = reader.fieldnames or []
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} has two columns {twice[0]!r}")
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        quoted = [cell for cell in row.values() if isinstance(cell, str) and re.fullmatch(' +".*"', cell, re.DOTALL)]
        yield where, UserError(f"{where}: has a space before the quotes of {quoted[0]:.60}") if quoted else row


def _read_parquet(path: Path, form: Format | None) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        there = pyarrow.parquet.read_schema(path).names
        wanted = [name for name in there if name in (*form.columns, *form.optional)] if form else None
        table = pyarrow.parquet.read_table(path, columns=wanted)
        labels = _labels(table.schema.metadata)
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    first = 1
    for batch in table.to_batches(64):
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError) as error:  # such as text that is no UTF-8
            raise UserError(f"cannot read {path}, row {first} or one of those after it: {error}") from error
        for number, row in enumerate(rows, first):
            for field in table.schema:
                value = row[field.name]
                if field.name in labels:
                    row[field.name] = dict(enumerate(labels[field.name])).get(value)
                elif field.name == "tools":
                    row[field.name] = without_null(value)
                elif "float" in str(field.type):
                    row[field.name] = _as_written(value, field.type)
            yield f"{path}, row {number}", row
        first += len(rows)


def _labels(written: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names that a column's numbers stand for, which Hugging Face's datasets writes beside them: 2 may mean "C"."""
    features = json.loads((written or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    found = {name: own for name, own in features.items() if isinstance(own, dict) and own.get("_type") == "ClassLabel"}
    return {name: own["names"] for name, own in found.items()}


def _as_written(value: Any, kind: Any) -> Any:
    """A value of Parquet with floats of 16 and 32 bits as they were written: 0.1, not 0.10000000149011612."""
    import numpy as np

    if isinstance(value, dict):
        return {part.name: _as_written(value[part.name], part.type) for part in kind}
    if isinstance(value, list):
        return [_as_written(entry, getattr(kind, "value_type", kind)) for entry in value]
    small = _SMALL.get(str(kind))
    return float(str(np.dtype(small).type(value))) if small and value is not None else value


def _renamed(row: Any, table: SourceTable, form: Format | None, where: str) -> Any:
    """The row with its columns renamed or converted as the recipe's ``columns`` or ``format`` say."""
    if isinstance(row, UserError):
        raise row
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with prompt and answer, got {type(row).__name__}")
    if row.get(_REST):
        raise UserError(f"{where}: has more cells than the first line has names: {row[_REST]!r:.60}")
    if form is None:
        return {**row, **{name: _at(row, path, where) for name, path in table.columns.items()}}
    for name in form.columns:
        if row.get(name) is None:
            raise UserError(f"{where}: no column {name!r}, which data.format = {table.format!r} needs")
    try:
        return form.convert(row)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, zlib.error) as error:
        raise UserError(f"{where} is not a row of data.format = {table.format!r}: {error!r}") from error


def _at(row: dict[str, Any], path: str, where: str) -> Any:
    """The column called ``path``, or a value inside a column: "reward_model.ground_truth", "prompt.0.content"."""
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"{where}: no column {path!r}; it has {', '.join(row) or 'none'}") from None
    return value


def _item_of_row(row: Any, where: str, exam: bool) -> Item:
    if "prompt" not in row or not {"answer", "tests"} & row.keys():
        missing = "answer" if "prompt" in row else "prompt"
        programs = " (or 'tests', for programs)" if missing == "answer" else ""
        raise UserError(f"{where}: no column {missing!r}{programs}; it has {', '.join(row) or 'none'}")
    given = row.get("answer")
    if exam and isinstance(given, float) and not math.isfinite(given):
        given = None  # pandas writes so that there is none
    try:
        prompt, answer = prompt_of(row["prompt"]), answer_of(given)
        others = row.get("also_right") or []
        if not isinstance(others, list):
            raise ValueError(f"also_right must be a list of answers, got {others!r:.60}")
        others = [other for other in map(answer_of, others) if other]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if answer is None and not exam and (given is not None or not row.get("tests")):  # tests need no answer
        if given is None and "tests" in row:
            raise UserError(f"{where}: a row without answer must have tests, got {row['tests']!r:.60}")
        raise UserError(f"{where}: answer must be a non-empty string or a finite number, got {given!r:.60}")
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:  # such as half of a surrogate pair, which no tokenizer accepts
        raise UserError(f"{where}: not valid text: {error}") from error
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    metadata |= {"also_right": others} if "also_right" in row else {}
    item = {"question": prompt, "answer": answer or "", "metadata": metadata}
    return item | {"exam": True} if exam else item
