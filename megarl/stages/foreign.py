"""Models and shards that somebody else wrote: checked before anything maps them as if they were megarl's own.

Arrow trusts the offsets of a file that it maps, and decompresses what a file says is compressed. So the metadata is
looked at first, then every offset and index, then the rules of a group.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.storage.shards import ANSWER, CORRECT, EXPERTS, FIRST_VERSION, LOSS_MASK, SCHEMA, VERSIONS

MAGIC, TAIL = 8, 10  # bytes before the first message of an Arrow file, and after its footer
_OPTIONAL = (VERSIONS, CORRECT, ANSWER, LOSS_MASK)
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3  # of MessageHeader in Arrow's Message.fbs
_CONTINUATION = 0xFFFFFFFF  # before the length of each message


def vocabulary_size(model: Path) -> int:
    """Of the model in a directory; `UserError` where its config.json does not say."""
    size = read_hf_config(model).get("vocab_size")
    if type(size) is not int or size < 1:
        raise UserError(f"{model}/config.json: vocab_size is {str(size)[:60]!a}, expected an integer")
    return size


def check_foreign_shard(path: Path, vocabulary: int) -> None:
    """`UserError` in one line unless the file is an uncompressed shard whose rows are whole groups."""
    try:
        with pa.memory_map(str(path)) as source:
            _check_messages(memoryview(source.read_buffer()))
            file = pa.ipc.open_file(source)
            _check_schema(file)
            batch = file.get_batch(0)
            batch.validate(full=True)
            _check_rows(batch, vocabulary)
    except (pa.ArrowException, ValueError, KeyError, IndexError, struct.error, OSError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"{path} is no shard of megarl: {reason[0][:300]}") from error


def _check_messages(data: memoryview) -> None:
    """Dictionaries and batches must lie in the file as they are, uncompressed, and be those that its footer names.

    A reader of the file follows the footer, so that messages between others would be seen by one of the two alone.
    """
    end = len(data) - TAIL
    (length,) = struct.unpack_from("<I", data, end)
    begin = end - length
    if begin < MAGIC:
        raise ValueError("it has no footer")
    visited, place = [], MAGIC
    while metadata := _metadata(data, place):
        kind, header = _header(metadata)
        slot = _slot(metadata, _root(metadata), 3)  # Message.bodyLength
        body = 0 if slot is None else struct.unpack_from("<q", metadata, slot)[0]
        batch = header if kind == _RECORD_BATCH else _field(metadata, header, 1) if kind == _DICTIONARY else None
        if batch is not None and _field(metadata, batch, 3) is not None:  # RecordBatch.compression
            raise ValueError("it is compressed")
        if body < 0 or (kind == _SCHEMA) != (place == MAGIC):
            raise ValueError("its messages are out of order")
        if place > MAGIC:
            visited.append((place, 8 + len(metadata), body))
        place += 8 + len(metadata) + body
    if place + 8 != begin or visited != sorted(_named(data[begin:end])):
        raise ValueError("its messages are not those that its footer names")


def _metadata(data: memoryview, place: int) -> memoryview:
    """Of the message that begins there, without its prefix of 8 bytes; none at the end of the messages."""
    marker, size = struct.unpack_from("<II", data, place)
    if marker != _CONTINUATION or place + 8 + size > len(data):
        raise ValueError("a message is cut off")
    return data[place + 8 : place + 8 + size]


def _named(footer: memoryview) -> Iterator[tuple[int, int, int]]:
    """Offset, and lengths of metadata and body, of each Block in Footer.dictionaries and .recordBatches (File.fbs)."""
    for number in (2, 3):
        blocks = _field(footer, _root(footer), number)
        if blocks is not None:
            (count,) = struct.unpack_from("<I", footer, blocks)
            yield from (struct.unpack_from("<qi4xq", footer, blocks + 4 + 24 * index) for index in range(count))


def _header(metadata: memoryview) -> tuple[int, int]:
    """Kind and place of what a message of Arrow's format says: Message.header_type and .header (FlatBuffers)."""
    root = _root(metadata)
    kind, place = _slot(metadata, root, 1), _field(metadata, root, 2)
    if kind is None or place is None:
        raise ValueError("a message has no header")
    return metadata[kind], place


def _root(data: memoryview) -> int:
    return int(struct.unpack_from("<I", data)[0])


def _slot(metadata: memoryview, table: int, number: int) -> int | None:
    """Where a FlatBuffers table has its field of that number; None: it has none."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (size,) = struct.unpack_from("<H", metadata, table - back)
    offset = 4 + 2 * number
    if offset + 2 > size:
        return None
    (place,) = struct.unpack_from("<H", metadata, table - back + offset)
    return table + place if place else None


def _field(metadata: memoryview, table: int, number: int) -> int | None:
    """Where the table begins to which such a field points."""
    slot = _slot(metadata, table, number)
    return None if slot is None else slot + struct.unpack_from("<I", metadata, slot)[0]


def _check_schema(file: pa.RecordBatchFileReader) -> None:
    if file.num_record_batches != 1:
        raise ValueError(f"it has {file.num_record_batches} batches")
    expected = {field.name: field.type for field in (*SCHEMA, *_OPTIONAL)}
    names = file.schema.names
    if len(set(names)) < len(names) or not set(SCHEMA.names) <= set(names):
        raise ValueError("it has not the columns of a shard")
    for field in file.schema:
        if field.name != EXPERTS and expected.get(field.name) != field.type:
            raise ValueError(f"column {field.name[:60]!a} is {field.type}")
        if field.name == EXPERTS and not _holds_experts(field.type):
            raise ValueError(f"column {EXPERTS} is {field.type}")


def _holds_experts(kind: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_list
    if not pa.types.is_list(kind) or not fixed(kind.value_type) or not fixed(kind.value_type.value_type):
        return False
    return kind.value_type.value_type.value_type in (pa.int8(), pa.int16())


def _check_rows(batch: pa.RecordBatch, vocabulary: int) -> None:
    for name in SCHEMA.names:
        column = batch[name]
        if column.null_count or (hasattr(column, "values") and column.values.null_count):
            raise ValueError(f"column {name} has nulls")
    for name in ("prompt_tokens", "response_tokens"):
        tokens = batch[name].values.to_numpy()
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise ValueError(f"a token of {name} is outside the vocabulary of {vocabulary}")
    versions = batch["policy_version"].to_numpy()
    if len(versions) and not FIRST_VERSION <= versions.min() <= versions.max() < -FIRST_VERSION:
        raise ValueError("a policy_version does not fit into 32 bits")
    for problem in _broken_groups(batch):
        raise ValueError(problem)


def _broken_groups(batch: pa.RecordBatch) -> Iterator[str]:
    ids, samples = batch["group_id"].to_numpy(), batch["sample"].to_numpy()
    if not len(ids):
        yield "it has no rows"
    if (np.diff(ids) < 0).any():
        yield "its groups are not in order"
    prompts, row = batch["prompt_tokens"], 0
    for group, rows in itertools.groupby(ids.tolist()):
        count = len(list(rows))
        if samples[row : row + count].tolist() != list(range(count)):
            yield f"group {group} has not the samples 0 to {count - 1} in order"
        first = prompts[row].values
        if any(not prompts[other].values.equals(first) for other in range(row + 1, row + count)):
            yield f"group {group} has responses to several prompts"
        row += count
