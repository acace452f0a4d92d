"""Copies of metrics, evaluations and samples for Weights & Biases and MLflow, by their own optional packages.

Several processes of a run log one after another, so ``trackers.json`` in the run directory says which run there is its
own. An update that is made again after a kill stands there twice, with equal numbers on the same machine and layout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import UserError
from megarl.recipe.tables import RunTable
from megarl.storage.files import write_atomic
from megarl.storage.tensorboard_events import numbers_of

PROJECT = "megarl"  # where neither WANDB_PROJECT nor MLFLOW_EXPERIMENT_NAME names another
NONE = {"wandb": False, "mlflow": False}  # of ``[run]``, for what is no run of its own
RUNS = "trackers.json"  # in the run directory: {tracker: the run there}


class Tracker(Protocol):
    """The run of a run directory in one of them, open for one process at a time."""

    def append(self, record: dict[str, Any]) -> None:
        """The metrics of an update."""

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        """The numbers of an evaluation, and ``samples`` of prompts and responses as text."""

    def close(self) -> None:
        """All is sent, as far as the server takes it."""


def open_trackers(root: Path, table: RunTable) -> list[Tracker]:
    """Those that the recipe asks for, for the run directory ``root``. What fails in one of them stops no run."""
    return [_Surviving(make, root) for wanted, make in ((table.wandb, _Wandb), (table.mlflow, _Mlflow)) if wanted]


def check_trackers(table: RunTable) -> None:
    """`UserError` where a package or W&B's key is missing, or MLflow's server does not answer."""
    for name, wanted, package in (("wandb", table.wandb, "wandb"), ("mlflow", table.mlflow, "mlflow-skinny")):
        if wanted and importlib.util.find_spec(name) is None:
            raise UserError(f"[run] {name} = true, but {name} is not installed: pip install {package}")
    if table.wandb and os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
        import wandb

        try:
            known = wandb.login(prompt=False)
        except Exception as error:
            raise UserError(f"[run] wandb = true, but W&B does not let this machine in: {error}") from error
        if not known:
            raise UserError("[run] wandb = true, but W&B has no key here: `wandb login`, or WANDB_MODE=offline")
    if table.mlflow:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            MlflowClient().get_experiment_by_name(_experiment())
        except (MlflowException, OSError) as error:
            what = f"MLFLOW_TRACKING_URI = {os.environ.get('MLFLOW_TRACKING_URI')} names: {error}"
            raise UserError(f"[run] mlflow = true, but MLflow cannot log to what {without_passwords(what)}") from error


def without_passwords(text: str) -> str:
    """``text`` with URLs that do not say who asks: it goes to logs."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


class _Surviving:
    """A tracker, until something in it fails: the run goes on without it, since all is in the run directory too."""

    def __init__(self, make: Callable[[Path], Tracker], root: Path) -> None:
        self._tracker: Tracker | None = None
        self._name = make.__name__.strip("_")
        with self._failing():
            self._tracker = make(root)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each package has its own, and its clients' too
            self._tracker = None
            print(
                f"{self._name} failed, and gets nothing more: {without_passwords(str(error))}",
                file=sys.stderr,
                flush=True,
            )

    def append(self, record: dict[str, Any]) -> None:
        if self._tracker:
            with self._failing():
                self._tracker.append(record)

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        if self._tracker:
            with self._failing():
                self._tracker.evaluation(suite, update, result, samples)

    def close(self) -> None:
        if self._tracker:
            with self._failing():
                self._tracker.close()


class _Wandb:
    def __init__(self, root: Path) -> None:
        import wandb

        identity = _runs(root).get("wandb") or _remember(root, "wandb", _begun_by_name(root) or secrets.token_hex(8))
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self._run = wandb.init(project=project, dir=str(root), name=root.name, id=identity, resume="allow")
        # W&B's own steps only rise, but evaluations of earlier policies come after later updates
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def append(self, record: dict[str, Any]) -> None:
        self._run.log(record)

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        import wandb

        numbers = {f"evaluation/{suite}/{name}": value for name, value in numbers_of(result).items()}
        table = wandb.Table(columns=["prompt", "response"], data=[list(sample) for sample in samples])
        self._run.log({"update": update, **numbers, f"samples/{suite}": table})

    def close(self) -> None:
        self._run.finish()


def _begun_by_name(root: Path) -> str | None:
    """What W&B keeps here says of a run directory without `RUNS` that its run is called as the directory is."""
    if (root / RUNS).exists():
        return None
    begun = re.compile(r"(offline-)?run-\d{8}_\d{6}-" + re.escape(root.name))
    return root.name if any(begun.fullmatch(path.name) for path in (root / "wandb").glob("*")) else None


class _Mlflow:
    def __init__(self, root: Path) -> None:
        from mlflow import MlflowClient

        self._client, self._final = MlflowClient(), root / "final"
        self._run = _runs(root).get("mlflow") or _remember(root, "mlflow", self._create(root.name))
        self._client.update_run(self._run, status="RUNNING")

    def _create(self, name: str) -> str:
        found = self._client.get_experiment_by_name(_experiment())
        experiment = found.experiment_id if found else self._client.create_experiment(_experiment())
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def append(self, record: dict[str, Any]) -> None:
        numbers = {name: value for name, value in record.items() if name != "update" and not isinstance(value, dict)}
        self._log(record["update"], numbers)

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        self._log(update, {f"evaluation/{suite}/{name}": value for name, value in numbers_of(result).items()})
        shown = {"samples": [{"prompt": prompt, "response": response} for prompt, response in samples]}
        self._client.log_dict(self._run, shown, f"samples/{suite}/update_{update:06d}.json")

    def _log(self, update: int, numbers: dict[str, float]) -> None:
        """By a thread of MLflow's, which says on stderr what the server does not take: no update waits for it."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w./ -]", "_", name), float(value), now, update) for name, value in numbers.items()
        ]
        self._client.log_batch(self._run, metrics, synchronous=False)

    def close(self) -> None:
        from mlflow import flush_async_logging

        flush_async_logging()
        if self._final.exists():
            self._client.set_terminated(self._run)


def _experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT


def _runs(root: Path) -> dict[str, str]:
    """None in a copy of a run directory whose original is still there: they are two runs."""
    path = root / RUNS
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    of = Path(found.pop("directory", root))
    return found if of == root.resolve() or not of.exists() else {}


def _remember(root: Path, tracker: str, run: str) -> str:
    write_atomic(root / RUNS, json.dumps(_runs(root) | {tracker: run, "directory": str(root.resolve())}))
    return run


def log_evaluation(
    root: Path, table: RunTable, suite: str, update: int, result: dict[str, Any], samples: Iterable[tuple[str, str]]
) -> None:
    """To each of `open_trackers`, from a process that logs nothing else."""
    if trackers := open_trackers(root, table):
        shown = list(samples)
        for tracker in trackers:
            tracker.evaluation(suite, update, result, shown)
            tracker.close()
