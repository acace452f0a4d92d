"""Weights & Biases and MLflow, with their own packages: what they log of a run agrees with its run directory.

`make test-slow WHAT=trackers` installs both. MLflow logs to a real tracking server on this machine; W&B, which would
need an account, logs offline.
"""

import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import urllib.request

import pytest

from megarl.data.tokenizer import load_decoder
from megarl.errors import UserError
from megarl.recipe.tables import RunTable
from megarl.storage.metrics import trackers
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.evaluations import SuiteResponses
from tests.helpers import events, free_ports, megarl, metrics
from tests.phases.test_changes import SMALL, settings

NUMBERS = ("accuracy", "pass_at_k", "maj_at_k")
BLOCK = 32768  # bytes per block of a .wandb file, a log in LevelDB's format after a header of 7 bytes


def required(package):
    if importlib.util.find_spec(package) is None:
        why = f"{package} is not installed: `make test-slow WHAT=trackers` does it"
        pytest.fail(why) if os.environ.get("MEGARL_REQUIRE_TRACKERS") == "1" else pytest.skip(why)


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory):
    """The URI of an MLflow tracking server on loopback."""
    required("mlflow")
    root, port = tmp_path_factory.mktemp("mlflow"), free_ports(1)[0]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{root}/runs.db", f"--artifacts-destination={root}/artifacts"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True)
    try:
        uri = f"http://127.0.0.1:{port}"
        while not answers(f"{uri}/health"):
            assert server.poll() is None, (root / "log").read_text()
            time.sleep(0.1)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def environment(mlflow_server):
    """The environment of processes that log to this machine alone."""
    quiet = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return os.environ | quiet | {"MLFLOW_TRACKING_URI": mlflow_server}


@pytest.fixture(scope="module")
def trained(recipe, environment, tmp_path_factory):
    """A run that was stopped and continued, so that several processes log it."""
    for package in ("wandb", "mlflow"):
        required(package)
    root = tmp_path_factory.mktemp("trackers") / "run"
    wanted = settings(*SMALL[:2], "eval.every=1", "eval.samples=2", "run.wandb=true", "run.mlflow=true")
    for until in (("--until", "optimize:0"), ()):
        result = megarl("train", recipe, "--run-dir", root, *wanted, *until, env=environment)
        assert result.returncode == 0, result.stderr
    return RunDir.open(root)


def samples(run, update):
    """[(prompt, first response)] of four held-out prompts after ``update`` updates, from the run directory."""
    decode, groups = load_decoder(run.stage(0).policy), SuiteResponses.of(run.root, "heldout").read(update)
    return [(decode(group.prompt_tokens.tolist()), decode(group.responses[0].tokens.tolist())) for group in groups[:4]]


def records(path):
    """The records (protocol buffers) of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # no room for another header
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def test_wandb_has_every_update_every_evaluation_and_samples(trained):
    files = sorted(trained.root.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1  # all processes log to the same run
    lines, steps = [], set()
    for path in files:
        for record in records(path):
            if record.WhichOneof("record_type") == "metric":
                steps.add((record.metric.glob_name, record.metric.step_metric))
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                lines.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert ("*", "update") in steps
    updates = {line["update"]: line for line in lines if "loss" in line}
    assert [(u, updates[u]["loss"], updates[u]["reward/mean"]) for u in sorted(updates)] == [
        (line["update"], line["loss"], line["reward/mean"]) for line in metrics(trained)
    ]
    logged = {line["update"]: line for line in lines if "evaluation/heldout/accuracy" in line}
    for event in events(trained, "evaluation"):
        line = logged.pop(event["update"])
        assert [line[f"evaluation/heldout/{name}"] for name in NUMBERS] == [event[name] for name in NUMBERS]
        (table,) = trained.root.glob(f"wandb/offline-run-*/files/{line['samples/heldout/path']}")
        assert json.loads(table.read_text())["data"] == [list(one) for one in samples(trained, event["update"])]
    assert not logged


@pytest.fixture
def client(mlflow_server, monkeypatch):
    """A client of the tracking server."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)  # for `download_artifacts`
    from mlflow import MlflowClient

    return MlflowClient()


def all_runs(client):
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


def test_mlflow_has_every_update_every_evaluation_and_samples(trained, client):
    assert client.get_experiment_by_name("megarl")
    (run,) = all_runs(client)  # all processes logged to the same run
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")

    def history(name):
        return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))

    for name in ("loss", "reward/mean", "grad_norm", "chi2", "chi2/bound"):
        assert history(name) == [(line["update"], line[name]) for line in metrics(trained)]
    evaluations = events(trained, "evaluation")
    for name in NUMBERS:
        assert history(f"evaluation/heldout/{name}") == sorted((event["update"], event[name]) for event in evaluations)
    for event in evaluations:
        path = client.download_artifacts(run.info.run_id, f"samples/heldout/update_{event['update']:06d}.json")
        with open(path) as file:
            found = [(one["prompt"], one["response"]) for one in json.load(file)["samples"]]
        assert found == samples(trained, event["update"])


def test_an_mlflow_server_that_does_not_answer_is_reported_before_anything_starts(recipe, environment, tmp_path):
    required("mlflow")
    absent = environment | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    result = megarl("train", recipe, "--run-dir", tmp_path / "run", *settings(*SMALL, "run.mlflow=true"), env=absent)
    assert result.returncode == 1 and "MLflow cannot log to MLFLOW_TRACKING_URI = http://127.0.0.1:9: " in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_missing_wandb_key_is_reported_before_anything_starts(recipe, environment, tmp_path):
    required("wandb")
    stranger = environment | {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    stranger.pop("WANDB_API_KEY", None)
    result = megarl("train", recipe, "--run-dir", tmp_path / "run", *settings(*SMALL, "run.wandb=true"), env=stranger)
    assert result.returncode == 2 and "run `wandb login`, or set WANDB_MODE=offline" in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()


class Failing:
    """A tracker whose server goes away at update 2; nothing may be called after that."""

    def __init__(self, root, first_update):
        self.asked = []

    def append(self, record):
        self.asked.append(record["update"])
        if record["update"] == 2:
            raise OSError("no route to https://user:secret@tracker.example/api")

    def close(self):
        raise AssertionError("nothing is asked of it any more")


def test_a_tracker_that_fails_is_dropped_and_the_run_continues(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trackers, "_Wandb", Failing)
    opened = trackers.Trackers(tmp_path, RunTable(tensorboard=False, wandb=True))
    (inside,) = opened._open.values()
    for update in range(1, 5):
        opened.append({"update": update})
    opened.close()
    assert inside.asked == [1, 2]
    said = capfd.readouterr().err
    assert said == "Failing failed, so nothing more is logged to it: no route to https://tracker.example/api\n"


def test_a_copied_run_directory_does_not_log_to_the_runs_of_the_original(tmp_path):
    (tmp_path / "original").mkdir()
    trackers._remember(tmp_path / "original", "wandb", "one")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    assert trackers._runs(tmp_path / "copy") == {}
    moved = (tmp_path / "original").rename(tmp_path / "moved")
    assert trackers._runs(moved) == {"wandb": "one"}


def test_a_missing_tracker_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for tracker, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(UserError, match=f"{tracker} is not installed: pip install {package}$"):
            trackers.check_trackers(RunTable(**{tracker: True}))
