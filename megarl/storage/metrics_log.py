"""metrics.jsonl: one object an update, each update exactly once, also after a kill. Copies go to TensorBoard, W&B."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megarl.recipe.tables import RunTable
from megarl.storage.files import disk_errors
from megarl.storage.json_lines import append_json, keep_json_lines


class MetricsWriter:
    """Continues ``path`` after ``last_update``: lines of later updates, which a kill undid, are dropped."""

    def __init__(self, path: Path, last_update: int, run: RunTable) -> None:
        self.path = path
        if path.exists():
            keep_json_lines(path, lambda record: record["update"] <= last_update)
        self.sinks: list[Any] = []
        if run.tensorboard:
            self.sinks.append(_TensorBoard(path.parent / "tensorboard", last_update + 1))
        if run.wandb:
            self.sinks.append(_Wandb(path.parent))

    def append(self, record: dict[str, Any]) -> None:
        """Add the metrics of one update."""
        append_json(self.path, record)
        for sink in self.sinks:
            sink.append(record)

    def sync(self) -> None:
        """Make what was appended durable: before a checkpoint, after which these updates are not made again."""
        if self.path.exists():
            with disk_errors(self.path), open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        self.sync()
        for sink in self.sinks:
            sink.close()


class _TensorBoard:
    def __init__(self, directory: Path, first_update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=first_update)

    def append(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import scalar

        scalars = {k: v for k, v in record.items() if k != "update" and not isinstance(v, dict)}  # no histograms
        values = [value for name, number in scalars.items() for value in scalar(name, number).value]
        # one event with all of an update's numbers: an event each would take five times as long
        self.writer._get_file_writer().add_summary(type(scalar("", 0.0))(value=values), record["update"])

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, run_dir: Path) -> None:
        import wandb

        self.run = wandb.init(project="megarl", dir=str(run_dir), name=run_dir.name, id=run_dir.name, resume="allow")

    def append(self, record: dict[str, Any]) -> None:
        self.run.log(record, step=record["update"])

    def close(self) -> None:
        self.run.finish()
