"""Evaluations and samples of their responses for TensorBoard, beside what `megarl.storage.metrics_log` writes.

Written with TensorBoard's own package alone: importing torch's half of it would keep an engine waiting.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NUMBERS = ("accuracy", "pass_at_k", "maj_at_k")  # of those that an evaluation has
LONGEST = 2000  # characters of a sample


def log_evaluation(
    root: Path, suite: str, update: int, result: dict[str, Any], samples: Iterable[tuple[str, str]]
) -> None:
    """Append to the run's ``tensorboard/``; ``samples``: prompts and responses."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    numbers = numbers_of(result).items()
    values = [Summary.Value(tag=f"evaluation/{suite}/{name}", simple_value=value) for name, value in numbers]
    values.append(_text(f"samples/{suite}", [_markdown(*sample) for sample in samples]))
    writer = EventFileWriter(str(root / "tensorboard"), filename_suffix=".evaluation")
    writer.add_event(Event(wall_time=time.time(), step=update, summary=Summary(value=values)))
    writer.close()


def numbers_of(result: dict[str, Any]) -> dict[str, float]:
    """Those of an evaluation that are logged elsewhere too, as far as it has them."""
    return {name: result[name] for name in NUMBERS if isinstance(result.get(name), int | float)}


def _text(tag: str, texts: list[str]) -> Any:
    """What TensorBoard's text plugin shows: a tensor of texts."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode() for text in texts], tensor_shape=shape)
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=plugin, tensor=tensor)


def _markdown(prompt: str, response: str) -> str:
    """As text that renders as itself, whatever markup a model wrote."""
    parts = (html.escape(text[:LONGEST]).replace("\n", "\n    ") for text in (prompt, response))
    return "\n\n".join(f"    {part}" for part in parts)
