"""Writes evaluations, with some of their responses, to TensorBoard; `megarl.storage.metrics_log` writes the metrics.

It uses the package tensorboard directly, since importing torch.utils.tensorboard would delay the engine process.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NUMBERS = ("accuracy", "pass_at_k", "maj_at_k")  # the fields of an evaluation that are logged
LONGEST = 2000  # characters of a prompt or response that are logged


def log_evaluation(
    root: Path, suite: str, update: int, result: dict[str, Any], samples: Iterable[tuple[str, str]]
) -> None:
    """Append an evaluation to ``tensorboard/`` in the run directory ``root``; ``samples``: (prompt, response) texts."""
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
    """{name: value} of those `NUMBERS` that an evaluation has."""
    return {name: result[name] for name in NUMBERS if isinstance(result.get(name), int | float)}


def _text(tag: str, texts: list[str]) -> Any:
    """A summary value for TensorBoard's text plugin: a tensor of strings."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode() for text in texts], tensor_shape=shape)
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=plugin, tensor=tensor)


def _markdown(prompt: str, response: str) -> str:
    """Markdown that shows both texts literally (as indented code), whatever markup they contain."""
    parts = (html.escape(text[:LONGEST]).replace("\n", "\n    ") for text in (prompt, response))
    return "\n\n".join(f"    {part}" for part in parts)
