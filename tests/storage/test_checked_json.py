"""Files of JSON lines that are incomplete, damaged, truncated, or replaced while another process reads them."""

import json
import os

import pytest

from megarl.errors import UserError
from megarl.storage.checked_json import JsonTail, append_json, decode, encode, read_intact_lines, read_json_lines


def append(path, *records, torn=""):
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) + torn)


def test_an_incomplete_last_line_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "x.jsonl"
    for before in ([], [{"a": 1}]):
        path.unlink(missing_ok=True)
        append(path, *before, torn='{"a": 2')
        assert read_json_lines(path) == before
        assert read_intact_lines(path) == (before, 1)
        append_json(path, {"a": 3})
        assert read_json_lines(path) == [*before, {"a": 3}]


def test_a_damaged_line_is_named_counted_or_skipped(tmp_path):
    path = tmp_path / "x.jsonl"
    for damage in (b"not json", b"[4]", b"", b'"\xff"'):
        path.write_bytes(b'{"a": 1}\n' + damage + b'\n{"a": 3}\n')
        with pytest.raises(UserError, match=r"x\.jsonl, line 2 is damaged"):
            read_json_lines(path)
        assert read_intact_lines(path) == ([{"a": 1}, {"a": 3}], len(damage) > 0)
        assert JsonTail(path).read() == (False, [{"a": 1}, {"a": 3}])


@pytest.mark.parametrize("indent", [None, 1])
def test_a_flipped_bit_never_changes_a_record_unnoticed(indent):
    record = {"a": 1, "b": 'text, with } and "crc": ', "c": [{"d": 0.5}]}
    data = encode(record, indent)
    assert decode(data, needs_checksum=True) == record
    assert json.loads(data)["c"] == record["c"]
    seen = 0
    for position in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        try:
            found = decode(bytes(damaged))
        except ValueError:
            seen += 1
            continue
        assert {name: found[name] for name in record} == record  # the bit was in the checksum's name or in white space
    assert seen > len(data) * 7


def test_tail_reads_only_what_was_appended(tmp_path):
    tail = JsonTail(tmp_path / "x.jsonl")
    assert tail.read() == (False, [])
    append(tail.path, {"a": 1}, {"a": 2}, torn='{"a": ')
    assert tail.read() == (False, [{"a": 1}, {"a": 2}])
    assert tail.read() == (False, [])
    append(tail.path, torn="3}\nnot json\n[4]\n")
    assert tail.read() == (False, [{"a": 3}])
    append(tail.path, torn='{"a": 44444')
    assert tail.read() == (False, [])
    os.truncate(tail.path, tail.path.stat().st_size - 11)  # by the next writer
    append(tail.path, {"a": 5})
    assert tail.read() == (False, [{"a": 5}])


def test_tail_starts_over_when_the_file_is_truncated(tmp_path):
    tail = JsonTail(tmp_path / "x.jsonl")
    append(tail.path, {"a": 1}, {"a": 2}, {"a": 3})
    tail.read()
    tail.path.write_text(json.dumps({"a": 1}) + "\n")
    assert tail.read() == (True, [{"a": 1}])
    assert tail.read() == (False, [])
