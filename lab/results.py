"""The CSVs of lab/results.tar.xz, as numbers of a point and a seed, and estimates over seeds."""

from __future__ import annotations

import csv
import io
import math
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megarl.commands.sweep.results import Estimate
from megarl.estimates import mean_of_replicates

RESULTS = Path("lab/results.tar.xz")
Curve = dict[int, float]  # update -> value
# of a seed: None where the run is not there, NaN where it is and has no such number
Value = Callable[["Sweep", int], float | None]


@dataclass
class Sweep:
    """What `lab.collect` wrote of one."""

    accuracy: dict[tuple[str, int], Curve] = field(default_factory=dict)  # (point, seed) -> evaluations
    metrics: dict[tuple[str, int, str], Curve] = field(default_factory=dict)  # (point, seed, metric) -> window means
    seconds: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)  # (point, seed) -> runs.csv

    @property
    def points(self) -> list[str]:
        """In the order of the sweep."""
        return list(dict.fromkeys(point for point, _ in self.accuracy))

    @property
    def seeds(self) -> list[int]:
        """Of any point."""
        return sorted({seed for _, seed in self.accuracy})

    def curve(self, point: str, seed: int, metric: str) -> Curve:
        """Accuracies for "accuracy", else the metric; empty where there is none."""
        if metric == "accuracy":
            return self.accuracy.get((point, seed), {})
        return self.metrics.get((point, seed, metric), {})

    def at(self, point: str, seed: int, update: int, metric: str = "accuracy") -> float | None:
        """Of one update."""
        return self.curve(point, seed, metric).get(update)

    def mean(self, point: str, seed: int, metric: str) -> float | None:
        """Over all updates."""
        values = list(self.curve(point, seed, metric).values())
        return sum(values) / len(values) if values else None


def load(archive: Path = RESULTS) -> dict[str, str]:
    """{"SWEEP/FILE": text}."""
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]


def save(files: Mapping[str, str], archive: Path = RESULTS) -> None:
    """The same files always make the same bytes."""
    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.USTAR_FORMAT) as tar:
        for name, text in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


def read(files: Mapping[str, str], name: str) -> Sweep:
    """An empty one where there is nothing yet."""
    sweep = Sweep()
    if f"{name}/runs.csv" not in files:
        return sweep
    for line in _lines(files[f"{name}/evaluations.csv"]):
        sweep.accuracy.setdefault(_key(line), {})[int(line["update"])] = float(line["accuracy"])
    for line in _lines(files[f"{name}/updates.csv"]):
        names = list(line)
        for metric in names[names.index("update") + 1 :]:
            if line[metric]:
                sweep.metrics.setdefault((*_key(line), metric), {})[int(line["update"])] = float(line[metric])
    for line in _lines(files[f"{name}/runs.csv"]):
        names = list(line)
        sweep.seconds[_key(line)] = {column: float(line[column]) for column in names[names.index("updates") :]}
    return sweep


def _lines(text: str) -> Iterable[dict[str, str]]:
    return csv.DictReader(io.StringIO(text))


def _key(line: dict[str, str]) -> tuple[str, int]:
    """(point, seed): the axes stand before the seed."""
    axes = list(line)[: list(line).index("seed")]
    return ",".join(line[axis] for axis in axes), int(line["seed"])


def estimate(sweep: Sweep, seeds: Sequence[int], value: Value) -> Estimate | None:
    """Mean over the seeds that have it, with Student's 95 % interval; None of fewer than two."""
    found = [x for seed in seeds if (x := value(sweep, seed)) is not None and not math.isnan(x)]
    return Estimate(*mean_of_replicates(np.array(found))) if len(found) > 1 else None


def difference(first: Value, second: Value, scale: float = 1.0) -> Value:
    """``first`` - ``scale`` * ``second`` of the same seed."""

    def value(sweep: Sweep, seed: int) -> float | None:
        a, b = first(sweep, seed), second(sweep, seed)
        return None if a is None or b is None else a - scale * b

    return value


def at(point: str, update: int, metric: str = "accuracy") -> Value:
    """Of one update."""
    return lambda sweep, seed: sweep.at(point, seed, update, metric)


def last(point: str) -> Value:
    """Accuracy at its last evaluation, which is none before the first update."""
    return lambda sweep, seed: next((x for _, x in sorted(sweep.curve(point, seed, "accuracy").items())[:0:-1]), None)


def mean(point: str, metric: str) -> Value:
    """Over all updates."""
    return lambda sweep, seed: sweep.mean(point, seed, metric)
