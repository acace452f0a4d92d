"""Checks of models and shards from untrusted sources, before anything maps them like megarl's own files.

Arrow trusts the offsets in a file that it maps, and decompresses whatever the file says is compressed. So the metadata
is checked first, then every offset and index, then that the rows form valid groups.
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

MAGIC, TAIL = 8, 10  # bytes before the first message of an Arrow file, and bytes after its footer
_OPTIONAL = (VERSIONS, CORRECT, ANSWER, LOSS_MASK)
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3  # the values of MessageHeader in Arrow's Message.fbs
_CONTINUATION = 0xFFFFFFFF  # before the length of each message


def vocabulary_size(model: Path) -> int:
    """The ``vocab_size`` in the config.json of a model; `UserError` if it has none."""
    size = read_hf_config(model).get("vocab_size")
    if type(size) is not int or size < 1:
        raise UserError(f"{model}/config.json: vocab_size is {str(size)[:60]!a}, expected an integer")
    return size


def check_foreign_shard(path: Path, vocabulary: int) -> None:
    """`UserError`, of one line, unless the file is an uncompressed shard whose rows are complete groups.

    vocabulary: the number of token ids of the model.
    """
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
        raise UserError(f"{path} is not a valid shard: {reason[0][:300]}") from error


def _check_messages(data: memoryview) -> None:
    """ValueError unless the messages of the file are uncompressed and exactly those that its footer names.

    Arrow reads the messages that the footer names, while this check walks through the file from its beginning: both
    must see the same ones.
    """
    end = len(data) - TAIL
    (length,) = struct.unpack_from("<I", data, end)
    begin = end - length
    if begin < MAGIC:
        raise ValueError("it has no footer")
    visited, offset = [], MAGIC
    while metadata := _metadata(data, offset):
        kind, header = _header(metadata)
        slot = _slot(metadata, _root(metadata), 3)  # Message.bodyLength
        body = 0 if slot is None else struct.unpack_from("<q", metadata, slot)[0]
        batch = header if kind == _RECORD_BATCH else _field(metadata, header, 1) if kind == _DICTIONARY else None
        if batch is not None and _field(metadata, batch, 3) is not None:  # RecordBatch.compression
            raise ValueError("it is compressed")
        if body < 0 or (kind == _SCHEMA) != (offset == MAGIC):
            raise ValueError("its messages are out of order")
        if offset > MAGIC:
            visited.append((offset, 8 + len(metadata), body))
        offset += 8 + len(metadata) + body
    if offset + 8 != begin or visited != sorted(_footer_blocks(data[begin:end])):
        raise ValueError("its messages are not those that its footer names")


def _metadata(data: memoryview, offset: int) -> memoryview:
    """The metadata of the message at ``offset``, without its prefix of 8 bytes; empty at the end of the messages."""
    marker, size = struct.unpack_from("<II", data, offset)
    if marker != _CONTINUATION or offset + 8 + size > len(data):
        raise ValueError("a message is cut off")
    return data[offset + 8 : offset + 8 + size]


def _footer_blocks(footer: memoryview) -> Iterator[tuple[int, int, int]]:
    """(offset, metadata length, body length) of each Block in Footer.dictionaries and .recordBatches (File.fbs)."""
    for number in (2, 3):
        blocks = _field(footer, _root(footer), number)
        if blocks is not None:
            (count,) = struct.unpack_from("<I", footer, blocks)
            yield from (struct.unpack_from("<qi4xq", footer, blocks + 4 + 24 * index) for index in range(count))


def _header(metadata: memoryview) -> tuple[int, int]:
    """(Message.header_type, offset of Message.header) of a message in Arrow's FlatBuffers format."""
    root = _root(metadata)
    kind, offset = _slot(metadata, root, 1), _field(metadata, root, 2)
    if kind is None or offset is None:
        raise ValueError("a message has no header")
    return metadata[kind], offset


def _root(data: memoryview) -> int:
    return int(struct.unpack_from("<I", data)[0])


def _slot(metadata: memoryview, table: int, number: int) -> int | None:
    """The offset of field ``number`` in the FlatBuffers table at ``table``; None if the table does not have it."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (size,) = struct.unpack_from("<H", metadata, table - back)
    offset = 4 + 2 * number
    if offset + 2 > size:
        return None
    (position,) = struct.unpack_from("<H", metadata, table - back + offset)
    return table + position if position else None


def _field(metadata: memoryview, table: int, number: int) -> int | None:
    """The offset of the table or vector that field ``number`` points to; None if there is no such field."""
    slot = _slot(metadata, table, number)
    return None if slot is None else slot + struct.unpack_from("<I", metadata, slot)[0]


def _check_schema(file: pa.RecordBatchFileReader) -> None:
    if file.num_record_batches != 1:
        raise ValueError(f"it has {file.num_record_batches} batches")
    expected = {field.name: field.type for field in (*SCHEMA, *_OPTIONAL)}
    names = file.schema.names
    if len(set(names)) < len(names) or not set(SCHEMA.names) <= set(names):
        raise ValueError("it does not have the columns of a shard")
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
    """The reasons why the rows are not complete groups in order."""
    ids, samples = batch["group_id"].to_numpy(), batch["sample"].to_numpy()
    if not len(ids):
        yield "it has no rows"
    if (np.diff(ids) < 0).any():
        yield "its groups are not in order"
    prompts, row = batch["prompt_tokens"], 0
    for group, rows in itertools.groupby(ids.tolist()):
        count = len(list(rows))
        if samples[row : row + count].tolist() != list(range(count)):
            yield f"group {group} does not have the samples 0 to {count - 1} in order"
        first = prompts[row].values
        if any(not prompts[other].values.equals(first) for other in range(row + 1, row + count)):
            yield f"group {group} has responses to several prompts"
        row += count
