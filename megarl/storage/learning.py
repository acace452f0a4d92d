"""Detects in the metrics that a run learns nothing; each cause is logged once per stage as ``learns_nothing``."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from megarl.storage.json_lines import append_json

UPDATES = 8  # consecutive updates that must show the same sign
ENTROPY_GONE = 1e-3  # nats per token: almost every token is certain
ESS_COLLAPSED = 0.02  # effective sample size as a share of the tokens


def find(records: list[dict[str, Any]]) -> dict[str, str]:
    """{kind: a sentence about it} of everything that kept all of these consecutive updates from learning."""
    found = {}
    rewards = [record.get("reward/mean") for record in records]
    if _all(records, "zero_variance_fraction", 1.0, 1.0):
        if len(set(rewards)) == 1:
            found["equal_rewards"] = (
                f"the responses to each prompt had equal rewards, {rewards[0]:g} on average in every update: "
                "no advantage differs from 0"
            )
        else:
            found["no_variance"] = "the responses to each prompt had equal rewards: no advantage differs from 0"
    elif _all(records, "grad_norm", 0.0, 0.0):
        found["no_gradient"] = "the gradient was 0: every token is clipped, vetoed or masked, or has advantage 0"
    if _all(records, "entropy", 0.0, ENTROPY_GONE):
        found["no_entropy"] = f"the entropy was below {ENTROPY_GONE:g} nats per token: the policy no longer explores"
    if _all(records, "ess", 0.0, ESS_COLLAPSED):
        found["no_sample"] = (
            f"the effective sample size was below {ESS_COLLAPSED:g} of the tokens: a few tokens dominate the gradient"
        )
    return found


def _all(records: list[dict[str, Any]], name: str, low: float, high: float) -> bool:
    """Whether the metric ``name`` lies between ``low`` and ``high`` in every record."""
    return all(name in record and low <= record[name] <= high for record in records)


class LearningWatch:
    """Watches the metrics of each update; a sink of `megarl.storage.metrics_log.MetricsWriter`.

    events: the file events.jsonl to log to.
    """

    def __init__(self, events: Path) -> None:
        self._events = events
        self._recent: deque[dict[str, Any]] = deque(maxlen=UPDATES)
        self._said: set[tuple[int, str]] = set()

    def append(self, record: dict[str, Any]) -> None:
        """Take the metrics of the next update."""
        self._recent.append(record)
        if len(self._recent) < UPDATES:
            return
        first, last = self._recent[0]["update"], record["update"]
        for kind, cause in find(list(self._recent)).items():
            if (record["stage"], kind) not in self._said:
                self._said.add((record["stage"], kind))
                place = {"stage": record["stage"], "first": first, "update": last}
                event = {"time": round(time.time(), 3), "event": "learns_nothing", **place}
                append_json(self._events, event | {"kind": kind, "cause": cause})

    def close(self) -> None: ...
