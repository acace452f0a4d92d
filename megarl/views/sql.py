"""``megarl sql``: SQL queries over a run, by DuckDB.

Shards are scanned in place as memory-mapped Arrow files, of which a query reads only the columns that it names; metrics
and events are read once. The database is in memory, with a limit. Queries are sandboxed: they can open no file, reach
no network and load no extension.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs

from megarl.errors import UserError, how_to_install
from megarl.foreign import escape
from megarl.storage.checked_json import Record
from megarl.storage.ledger import check_size
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir.evaluations import SuiteResponses
from megarl.storage.shards import OPTIONAL, ROW, ROW_TYPE, SCHEMA
from megarl.views.responses.select import decoder, stages
from megarl.views.responses.text import aligned
from megarl.views.run_reader import read_run

if TYPE_CHECKING:
    import duckdb

MEMORY = "1GB"  # limit of DuckDB's memory, which does not count pages of mapped files
SHOWN_ROWS, SHOWN_CHARACTERS = 100, 60  # in a terminal: rows of a table, characters of a cell
_BATCH = 1024  # rows that are fetched at a time
_COLUMNS = [*SCHEMA, *OPTIONAL, (ROW, ROW_TYPE)]
_PLACES = {  # by table: columns that are put before those of the shards, and say where a row comes from
    "responses": [("stage", pa.int32())],
    "evaluation_responses": [("suite", pa.string()), ("update", pa.int64())],
}
_EVENTS = {"time": pa.float64(), "event": pa.string(), "stage": pa.int32(), "phase": pa.string()}
# the tables that queries see; a column that a shard leaves out is null
_VIEW = """
create view {name} as select
    {places}, group_id as prompt, sample, reward, coalesce(correct, reward) as correct, finish_reason,
    len(response_tokens)::int as length, policy_version, answer, prompt_tokens, response_tokens, rollout_logprobs,
    loss_mask, policy_versions, discarded, weights_hash::varchar as weights_hash, logprob_mode::varchar as logprob_mode,
    shard, prompt_row::json as prompt_row
from {name}_shards
"""


def query(root: Path, text: str, memory: str = MEMORY) -> Iterator[Record]:
    """The rows of a query over the run directory ``root``, fetched as they are iterated over.

    memory: DuckDB's limit, such as ``"500MB"``; data beyond it is spilled to a temporary directory. A query that DuckDB
    refuses raises a `UserError` of one line.
    """
    duckdb = _duckdb()
    with tempfile.TemporaryDirectory(prefix="megarl-sql-") as spill:
        try:
            with contextlib.closing(_open(root, spill, memory)) as connection:
                result = connection.execute(text)
                names = [column[0] for column in result.description or ()] if result else []
                while names and (rows := result.fetchmany(_BATCH)):
                    for row in rows:
                        yield dict(zip(names, row, strict=True))
        except duckdb.Error as error:
            message = " ".join(str(error).partition("\n\nLINE ")[0].split())  # without the query
            raise UserError(f"SQL: {escape(message, newlines=False)}") from error


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        remedy = how_to_install("sql")
        raise UserError(f"SQL needs DuckDB, which the extra sql of megarl installs: {remedy}") from error
    return duckdb


def _open(root: Path, spill: str, memory: str) -> duckdb.DuckDBPyConnection:
    """A database with all tables of the run, whose configuration is locked."""
    duckdb = _duckdb()
    connection = duckdb.connect(":memory:", config={"memory_limit": memory, "temp_directory": spill})
    for name, table in _tables(root).items():
        connection.register(name, table)
    for name, places in _PLACES.items():
        connection.execute(_VIEW.format(name=name, places=", ".join(column for column, _ in places)))
    _register_decode(connection, root)
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def _tables(root: Path) -> dict[str, Any]:
    run = read_run(root, "")
    return {
        "metrics": _metrics(run.updates),
        "events": _table(run.events, _EVENTS),
        "responses_shards": _dataset("responses", ((place, [stage]) for stage, place in stages(root).items())),
        "evaluation_responses_shards": _dataset("evaluation_responses", _evaluations(root)),
    }


def _register_decode(connection: Any, root: Path) -> None:
    """Register the SQL function ``decode``, from tokens to text. The tokenizer is loaded at its first call."""
    decode: list[Any] = []

    def texts(tokens: pa.ChunkedArray) -> pa.Array:
        decode.extend([] if decode else [decoder(root)])
        rows = (row.values.to_numpy() if row.is_valid else None for row in tokens)
        return pa.array([None if row is None else decode[0](row) for row in rows], pa.string())

    kind = connection.type("INTEGER[]")
    connection.create_function("decode", texts, [kind], connection.type("VARCHAR"), type="arrow")


def _evaluations(root: Path) -> Iterator[tuple[Path, list[Any]]]:
    """(rollout store, [suite, update]) of each complete evaluation."""
    for prompts in sorted(root.glob("evaluations/*/prompts.jsonl")):
        suite = SuiteResponses(prompts.parent)
        for update in suite.versions():
            yield suite.responses(update), [prompts.parent.name, update]


def _dataset(table: str, stores: Iterable[tuple[Path, list[Any]]]) -> ds.Dataset:
    """The mapped shards that the ledgers of ``stores`` name, with the columns of `_PLACES` and their file's name.

    stores: (directory, the values of `_PLACES`) of each.
    """
    columns = [*_PLACES[table], ("shard", pa.string())]
    schema = pa.schema([*columns, *_COLUMNS])
    paths: list[str] = []
    conditions: list[ds.Expression] = []
    for directory, place in stores:
        for entry in RolloutStore(directory, one_policy=False).entries:
            check_size(directory / entry.shard, entry)
            paths.append(str((directory / entry.shard).resolve()))
            values = zip(columns, [*place, entry.shard], strict=True)
            conditions.append(functools.reduce(operator.and_, (ds.field(name) == value for (name, _), value in values)))
    if not paths:
        return ds.dataset(schema.empty_table())
    return ds.FileSystemDataset.from_paths(
        paths,
        schema=schema,
        format=ds.IpcFileFormat(),
        filesystem=fs.LocalFileSystem(use_mmap=True),
        partitions=conditions,
    )


def _metrics(records: list[Record]) -> pa.Table:
    """A column for each metric; as JSON if its values are tables such as histograms."""
    columns: dict[str, pa.Array] = {"update": pa.array([], pa.int64())}
    for name in dict.fromkeys(name for record in records for name in record):
        values = (record.get(name) for record in records)
        columns[name] = pa.array([json.dumps(value) if isinstance(value, dict) else value for value in values])
    return pa.table(columns)


def _table(records: list[Record], kinds: dict[str, pa.DataType]) -> pa.Table:
    """The columns ``kinds`` of the records, and a column ``fields`` with each whole record as JSON."""
    columns = {name: pa.array([record.get(name) for record in records], kind) for name, kind in kinds.items()}
    return pa.table(columns | {"fields": pa.array([json.dumps(record) for record in records], pa.string())})


def as_table(rows: Iterator[Record]) -> str:
    """The first rows as a table for a terminal, with long cells cut and control characters escaped."""
    shown = list(itertools.islice(rows, SHOWN_ROWS + 1))
    if not shown:
        return "no rows"
    cells = [[_cell(name) for name in shown[0]]]
    cells += [[_cell(value) for value in row.values()] for row in shown[:SHOWN_ROWS]]
    numbers = {n for n, value in enumerate(shown[0].values()) if isinstance(value, (int, float))}
    lines = aligned(cells, right=numbers)
    if len(shown) > SHOWN_ROWS:
        lines.append(f"the first {SHOWN_ROWS} rows; --json prints all")
    return "\n".join(lines)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = escape(text, newlines=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
