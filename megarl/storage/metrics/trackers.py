"""Sends metrics, evaluations and samples to the trackers asked for: TensorBoard, Weights & Biases and MLflow.

The processes of a run log one after another, so ``trackers.json`` in the run directory remembers the tracker's id of
the run. An update that is made again after a kill is logged twice; on the same machine and layout with equal numbers.
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.errors import PhaseFailed, UserError
from megarl.recipe.tables import RunTable
from megarl.storage.files import write_atomic

PROJECT = "megarl"  # default of WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME
NONE = {"wandb": False, "mlflow": False}  # settings of ``[run]`` that turn trackers off
RUNS = "trackers.json"  # in the run directory: {tracker: its id of the run}
NUMBERS = ("accuracy", "pass_at_k", "maj_at_k")  # the fields of an evaluation that are logged
LONGEST = 2000  # characters of a prompt or response that are logged
RULE = "\n\n---\n\n"  # of Markdown, between two samples


class Trackers:
    """The connections to the run in the trackers that the recipe asks for, for the run directory ``root``.

    One that fails is dropped: everything is in the run directory too, so the run continues.
    first_update: the first one that this process logs, if it logs any.
    """

    def __init__(self, root: Path, table: RunTable, first_update: int | None = None) -> None:
        kinds = {_TensorBoard: table.tensorboard, _Wandb: table.wandb, _Mlflow: table.mlflow}
        # first the classes, in whose place the next line puts the connections
        self._open: dict[str, Any] = {kind.__name__.strip("_"): kind for kind, wanted in kinds.items() if wanted}
        self._each(lambda name, kind: self._open.update({name: kind(root, first_update)}))

    def _each(self, what: Callable[[str, Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                what(name, tracker)
            except Exception as error:  # the packages and their HTTP clients have many kinds
                del self._open[name]
                why = without_passwords(str(error))
                print(f"{name} failed, so nothing more is logged to it: {why}", file=sys.stderr, flush=True)

    def append(self, record: dict[str, Any]) -> None:
        """Log the metrics of an update."""
        self._each(lambda _, tracker: tracker.append(record))

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: Iterable[tuple[str, str]]) -> None:
        """Log the numbers of an evaluation, and ``samples``: some (prompt, response) texts."""
        texts = list(samples) if self._open else []
        self._each(lambda _, tracker: tracker.evaluation(suite, update, result, texts))

    def close(self) -> None:
        """Wait until everything is sent, as far as the servers accept it."""
        self._each(lambda _, tracker: tracker.close())


def check_trackers(table: RunTable) -> None:
    """`UserError` if a package or W&B's API key is missing; `PhaseFailed` if MLflow's server does not answer."""
    for name, wanted, package in (("wandb", table.wandb, "wandb"), ("mlflow", table.mlflow, "mlflow-skinny")):
        if wanted and importlib.util.find_spec(name) is None:
            raise UserError(f"[run] {name} = true, but {name} is not installed: pip install {package}")
    if table.wandb and os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
        import wandb

        try:
            known = wandb.login(prompt=False)
        except Exception as error:
            raise UserError(f"[run] wandb = true, but W&B refuses the login: {error}") from error
        if not known:
            raise UserError("[run] wandb = true, but there is no W&B key: run `wandb login`, or set WANDB_MODE=offline")
    if table.mlflow:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            MlflowClient().get_experiment_by_name(_experiment())
        except (MlflowException, OSError) as error:
            what = f"MLFLOW_TRACKING_URI = {os.environ.get('MLFLOW_TRACKING_URI')}: {error}"
            raise PhaseFailed(f"[run] mlflow = true, but MLflow cannot log to {without_passwords(what)}") from error


def without_passwords(text: str) -> str:
    """``text``, which goes to logs, with user names and passwords removed from its URLs."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


class _TensorBoard:
    """Appends to ``tensorboard/``; what a killed process logged of ``first_update`` and later ones is hidden."""

    def __init__(self, root: Path, first_update: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(root / "tensorboard"), purge_step=first_update)

    def append(self, record: dict[str, Any]) -> None:
        self._add(record["update"], scalars(record))

    def _add(self, update: int, numbers: dict[str, float]) -> None:
        """As one event: `SummaryWriter.add_scalar` would make one of each number and wake its thread for it."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._writer.file_writer.add_summary(Summary(value=values), update)

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        self._add(update, numbers_of(suite, result))
        self._writer.add_text(f"samples/{suite}", RULE.join(_markdown(*sample) for sample in samples), update)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, root: Path, _: int | None) -> None:
        import wandb

        identity = _runs(root).get("wandb") or _remember(root, "wandb", secrets.token_hex(8))
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self._run = wandb.init(project=project, dir=str(root), name=root.name, id=identity, resume="allow")
        # W&B's own step can only increase, but a policy may be evaluated after later updates were logged
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def append(self, record: dict[str, Any]) -> None:
        self._run.log(record)

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        import wandb

        table = wandb.Table(columns=["prompt", "response"], data=[list(sample) for sample in samples])
        self._run.log({"update": update, **numbers_of(suite, result), f"samples/{suite}": table})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, root: Path, _: int | None) -> None:
        from mlflow import MlflowClient

        self._client, self._final = MlflowClient(), root / "final"
        self._run = _runs(root).get("mlflow") or _remember(root, "mlflow", self._create(root.name))
        self._client.update_run(self._run, status="RUNNING")

    def _create(self, name: str) -> str:
        found = self._client.get_experiment_by_name(_experiment())
        experiment = found.experiment_id if found else self._client.create_experiment(_experiment())
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def append(self, record: dict[str, Any]) -> None:
        self._log(record["update"], scalars(record))

    def evaluation(self, suite: str, update: int, result: dict[str, Any], samples: list[tuple[str, str]]) -> None:
        self._log(update, numbers_of(suite, result))
        shown = {"samples": [{"prompt": prompt, "response": response} for prompt, response in samples]}
        self._client.log_dict(self._run, shown, f"samples/{suite}/update_{update:06d}.json")

    def _log(self, update: int, numbers: dict[str, float]) -> None:
        """Log in a thread of MLflow's, so that no update waits; it reports on stderr what the server refuses."""
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
    """{tracker: id of the run} of a run directory.

    Empty in a copy of a run directory whose original still exists, since the two are different runs.
    """
    path = root / RUNS
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    of = Path(found.pop("directory", root))
    return found if of == root.resolve() or not of.exists() else {}


def _remember(root: Path, tracker: str, run: str) -> str:
    """Store the tracker's id of the run, and return it."""
    write_atomic(root / RUNS, json.dumps(_runs(root) | {tracker: run, "directory": str(root.resolve())}))
    return run


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of an update without its number and histograms."""
    return {name: value for name, value in record.items() if name != "update" and not isinstance(value, dict)}


def numbers_of(suite: str, result: dict[str, Any]) -> dict[str, float]:
    """{evaluation/SUITE/name: value} of those `NUMBERS` that an evaluation has."""
    found = {name: result.get(name) for name in NUMBERS}
    return {f"evaluation/{suite}/{name}": value for name, value in found.items() if isinstance(value, int | float)}


def _markdown(prompt: str, response: str) -> str:
    """Markdown that shows both texts literally (as indented code), whatever markup they contain."""
    parts = (html.escape(text[:LONGEST]).replace("\n", "\n    ") for text in (prompt, response))
    return "\n\n".join(f"    {part}" for part in parts)
