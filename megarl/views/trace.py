"""``megarl trace``: phases, updates, exports, evaluations and replicas of a run as a trace for Perfetto or Chrome.

The format is Chrome's JSON object (Trace Event Format): complete events "X", instants "i" and counters "C", in
microseconds. Open it at https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.storage.checked_json import Record
from megarl.views.run_reader import Run, read_run

RUN, REPLICAS = 1, 2  # the processes of the trace
LANES = {"phases": 1, "updates": 2, "exports and evaluations": 3, "trouble": 4}
_ENDS = ("phase_end", "phase_failed", "phase_stopped")
_TROUBLE = ("restart", "phase_failed", "no_progress", "damaged_checkpoint", "restored_metrics", "learns_nothing")
_COUNTED = ("decoding", "responses", "tokens", "truncated")  # counters of a replica


def write_trace(root: Path, output: Path) -> str:
    """Write the trace of a run, which may be in progress, to ``output``; returns the text to print."""
    run = read_run(root, root.name)
    events = sorted(filter(_is_complete, run.events), key=_time)
    begin = _time(events[0]) if events else 0.0
    entries = [*_names(events), *_phases(events), *_updates(run, events), *_work(events), *_replicas(events)]
    for entry in entries:
        if "ts" in entry:
            entry["ts"] = round((entry["ts"] - begin) * 1e6)
    output.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"run": run.name}}))
    return f"wrote {output}: open it at https://ui.perfetto.dev"


def _is_complete(event: Record) -> bool:
    return isinstance(event.get("time"), int | float) and isinstance(event.get("event"), str)


def _time(event: Record) -> float:
    return float(event["time"])


def _names(events: Sequence[Record]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": RUN, "name": "process_name", "args": {"name": "run"}}
    for name, lane in LANES.items():
        yield {"ph": "M", "pid": RUN, "tid": lane, "name": "thread_name", "args": {"name": name}}
    if any(event["event"] == "rollout_progress" for event in events):
        yield {"ph": "M", "pid": REPLICAS, "name": "process_name", "args": {"name": "engine replicas"}}


def _span(name: str, lane: int, end: float, seconds: float, **args: Any) -> dict[str, Any]:
    duration = max(0, round(seconds * 1e6))
    return {"ph": "X", "pid": RUN, "tid": lane, "name": name, "ts": end - seconds, "dur": duration, "args": args}


def _phases(events: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Phases from start to end; without a known end (killed, or in progress), up to the next start or last event."""
    begun: Record | None = None
    for event in [*events, {"event": "phase_start", "time": _time(events[-1])}] if events else []:
        if begun is not None and event["event"] in ("phase_start", *_ENDS):
            how = event["event"].removeprefix("phase_") if event["event"] in _ENDS else "not ended"
            name = f"stage {begun.get('stage', 0) + 1} {begun.get('phase')}"
            yield _span(name, LANES["phases"], _time(event), _time(event) - _time(begun), ended=how)
            begun = None
        if event["event"] == "phase_start" and "phase" in event:
            begun = event


def _updates(run: Run, events: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The updates of a stage one after another, ending at its export: metrics say how long they took, not when."""
    for stage in sorted({line.get("stage", 0) for line in run.updates}):
        lines = [line for line in run.updates if line.get("stage", 0) == stage and "seconds" in line]
        ends = [_time(e) - e.get("seconds", 0.0) for e in events if e["event"] == "export" and e.get("stage") == stage]
        later = [_time(e) for e in events if e.get("stage") == stage and e["event"] in _ENDS]
        end = max(ends or later or [_time(event) for event in events[-1:]] or [0.0])
        for line in reversed(lines):
            shown = {name: line[name] for name in ("staleness", "loss", "grad_norm", "tokens") if name in line}
            yield _span(f"update {line['update']}", LANES["updates"], end, line["seconds"], **shown)
            end -= line["seconds"] + line.get("idle_seconds", 0.0)


def _work(events: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for event in events:
        kind, time = event["event"], _time(event)
        if kind == "export":
            yield _span(
                f"export {event.get('policy')}", LANES["exports and evaluations"], time, event.get("seconds", 0)
            )
        elif kind == "evaluation" and "accuracy" in event:
            name = f"evaluation {event.get('suite', '')} {event['accuracy']:.3f}"
            yield _span(name, LANES["exports and evaluations"], time, event.get("seconds", 0.0))
        elif kind in _TROUBLE:
            args = {key: value for key, value in event.items() if key not in ("time", "event")}
            instant = {"ph": "i", "s": "p", "pid": RUN, "tid": LANES["trouble"], "ts": time}
            yield instant | {"name": kind, "args": args}


def _replicas(events: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event["event"] == "rollout_progress":
            counts = {name: event[name] for name in _COUNTED if name in event}
            name = f"replica {event.get('rank', 0)}"
            yield {"ph": "C", "pid": REPLICAS, "tid": 0, "name": name, "ts": _time(event), "args": counts}
