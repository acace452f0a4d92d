"""metrics.jsonl: its copy in TensorBoard, and its check against the position in a checkpoint."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.errors import UserError
from megarl.recipe.tables import RunTable
from megarl.storage.metrics import NOTHING, MetricsWriter, agrees

PLAIN = RunTable(tensorboard=False)


def test_tensorboard_has_every_number_of_every_update(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", NOTHING, b"", 0, RunTable())
    for update in (1, 2, 3):
        writer.append({"update": update, "loss": 0.5 * update, "ratio/mean": 1.0, "staleness/tokens": {"0": 7}})
        if update == 2:
            position, lines = writer.position, writer.lines
    writer.close()
    # update 3 was made after the last checkpoint, so the start after a kill makes it again
    writer = MetricsWriter(tmp_path / "metrics.jsonl", position, lines, 2, RunTable())
    writer.append({"update": 3, "loss": 9.0, "ratio/mean": 2.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "ratio/mean"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [e.value for e in events.Scalars("ratio/mean")] == [1.0, 1.0, 2.0]


@pytest.fixture
def written(tmp_path):
    """(path, content, position and lines after update 3) of a metrics file of two stages with two updates each."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path, NOTHING, b"", 0, PLAIN)
    for update in (1, 2):
        first.append({"update": update, "loss": 0.5})
    second = MetricsWriter(path, first.position, b"", 2, PLAIN)
    second.append({"update": 3, "loss": 0.5})
    position, lines = second.position, second.lines
    second.append({"update": 4, "loss": 0.5})
    return path, path.read_bytes(), position, lines


def test_a_damaged_metrics_file_does_not_agree_with_the_position(written):
    path, data, position, _ = written
    assert agrees(path, position)
    first, second, third, fourth = data.splitlines(keepends=True)
    damaged = [b"", data[: len(first) + 9], data.replace(b"0.5", b"0.6", 1), second + first + third + fourth]
    damaged += [first + third + fourth, first + second + b"\0" * len(third) + fourth]
    for content in damaged:
        path.write_bytes(content)
        assert not agrees(path, position), content
    path.unlink()
    assert not agrees(path, position) and agrees(path, NOTHING)


def test_a_resumed_stage_removes_the_lines_after_its_checkpoint(written):
    path, data, position, lines = written
    for after in (b"", b'{"upd', data):
        path.write_bytes(data[: position.size] + after)
        writer = MetricsWriter(path, position, lines, 3, PLAIN)
        assert path.read_bytes() == data[: position.size]
        writer.append({"update": 4, "loss": 0.5})
        assert path.read_bytes() == data and agrees(path, writer.position)
    path.write_bytes(data[:9])
    with pytest.raises(UserError, match="metrics.jsonl has 9 bytes, but had .* at the checkpoint: start again"):
        MetricsWriter(path, position, lines, 3, PLAIN)
    assert path.read_bytes() == data[:9]
