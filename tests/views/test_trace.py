"""The trace of a run, with every phase and update once, in Perfetto's format; and its evaluations in TensorBoard."""

import itertools
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import events, megarl, read_lines
from tests.phases.test_changes import SMALL, settings, train


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    root = tmp_path_factory.mktemp("trace") / "run"
    train(recipe, root, *settings(*SMALL, "schedule.stages=1", "eval.every=1", "run.tensorboard=true"))
    return root


def test_phases_and_updates_are_at_the_times_at_which_they_ran(trained):
    from megarl.storage.run_dir import RunDir

    assert megarl("trace", trained).returncode == 0
    found = json.loads((trained / "trace.json").read_text())["traceEvents"]
    spans = [entry for entry in found if entry["ph"] == "X"]
    phases = [entry for entry in spans if entry["tid"] == 1]
    names = ["stage 1 rollout", "stage 1 optimize", "stage 2 evaluate"]
    assert [(p["name"], p["args"]["ended"]) for p in phases] == [(name, "end") for name in names]
    run = RunDir.open(trained)
    for phase, begin, end in zip(phases, events(run, "phase_start"), events(run, "phase_end"), strict=True):
        assert phase["dur"] == round(1e6 * (end["time"] - begin["time"])) >= 1e6 * end["seconds"] - 1e3
    optimize = phases[1]
    updates = sorted((entry for entry in spans if entry["tid"] == 2), key=lambda entry: entry["ts"])
    lines = read_lines(run.metrics)
    assert [u["name"] for u in updates] == [f"update {line['update']}" for line in lines]
    assert [u["dur"] for u in updates] == [round(1e6 * line["seconds"]) for line in lines]
    for update in updates:
        assert optimize["ts"] <= update["ts"] and update["ts"] + update["dur"] <= optimize["ts"] + optimize["dur"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(updates))
    assert {entry["name"] for entry in found if entry["ph"] == "C"} == {"replica 0"}


def test_phases_that_never_ended_are_in_the_trace(trained, tmp_path):
    (tmp_path / "recipe.toml").write_bytes((trained / "recipe.toml").read_bytes())
    kept = [
        line for line in (trained / "events.jsonl").read_text().splitlines(keepends=True) if "phase_end" not in line
    ]
    (tmp_path / "events.jsonl").write_text("".join([*kept[:-1], '{"time": 1.0}\n']))  # and a line without an event
    assert megarl("trace", tmp_path, "--output", tmp_path / "t.json").returncode == 0
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    phases = [entry for entry in found if entry["ph"] == "X" and entry["tid"] == 1]
    assert [p["args"]["ended"] for p in phases] == ["not ended"] * 3
    assert all(p["dur"] >= 0 for p in phases)


def test_tensorboard_has_evaluations_with_samples_of_their_responses(trained):
    events_file = EventAccumulator(str(trained / "tensorboard"))
    events_file.Reload()
    logged = [e for e in read_lines(trained / "events.jsonl") if e["event"] == "evaluation"]
    found = [(e.step, e.value) for e in events_file.Scalars("evaluation/heldout/accuracy")]
    assert found == [(e["update"], pytest.approx(e["accuracy"])) for e in logged] and len(found) == 2
    texts = events_file.Tensors("samples/heldout")
    assert [text.step for text in texts] == [0, 2]
    shown = [value.decode() for value in texts[0].tensor_proto.string_val]
    assert len(shown) == 4 and all(text.startswith("    ") and "=" in text for text in shown)
    assert len(events_file.Scalars("loss")) == 2
