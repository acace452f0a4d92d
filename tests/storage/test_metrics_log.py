"""metrics.jsonl and what stands beside it."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.recipe.tables import RunTable
from megarl.storage.metrics_log import MetricsWriter


def test_tensorboard_has_every_number_of_every_update(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0, RunTable())
    for update in (1, 2, 3):
        writer.append({"update": update, "loss": 0.5 * update, "ratio/mean": 1.0, "staleness/tokens": {"0": 7}})
    writer.close()
    # a killed process made update 3 after the last checkpoint: it is made again
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 2, RunTable())
    writer.append({"update": 3, "loss": 9.0, "ratio/mean": 2.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "ratio/mean"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [e.value for e in events.Scalars("ratio/mean")] == [1.0, 1.0, 2.0]
