"""The progress display follows files that grow, are cut or are replaced."""

import io
import json
import random
import re
import threading
import time

import pytest

from megarl.views import progress
from megarl.views.progress import Progress, describe_state
from megarl.views.run_state import RunState
from tests.views.synthetic_run import make_events, make_recipe, update_record, write_lines


class Watched:
    """A run directory, and what the display knows of it after each change."""

    def __init__(self, root):
        self.root, self.state = root, RunState(root, make_recipe())

    def append(self, name, *records):
        """Append records to a file, and look at the run."""
        with open(self.root / name, "a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        return self.state.poll()

    def happens(self, *events):
        return self.append("events.jsonl", *events)

    @property
    def line(self):
        return describe_state(self.state)

    @property
    def parts(self):
        return set(self.line.split(", "))


def start(phase, stage, when=None):
    return {"time": when or time.time(), "event": "phase_start", "phase": phase, "stage": stage}


def report(**fields):
    return {"time": time.time(), "event": "rollout_progress", "stage": 1, "rank": 0, "seconds": 5} | fields


def test_a_rollout_phase_shows_what_the_replicas_have_generated(tmp_path):
    """An earlier attempt has stored 2 of 1536 groups."""
    run = Watched(tmp_path)
    assert run.state.poll() == [] and run.state.done == (0, 0, "")
    seen = run.happens(start("rollout", 1), {"event": "resume", "phase": "rollout", "skipped": 2, "total": 1536})
    assert [event["event"] for event in seen] == ["phase_start", "resume"]
    run.happens(report(ended=0, tokens=0, decoding=100, tokens_per_second=4, seconds=50))
    assert run.state.done == (2, 1536, "groups") and run.state.reward is None and run.state.seconds_left is None
    assert {"4 tokens/s", "decoding 100"} <= run.parts
    one = report(ended=60, tokens=180, groups=3, responses=24, truncated=6, reward_sum=6.0, decoding=40, seconds=60)
    one |= {"tokens_per_second": 5}
    run.happens(one, one | {"rank": 1, "seconds": 58})
    assert run.state.done == (8, 1536, "groups") and run.state.reward == 0.25
    assert {"10 tokens/s", "responses 120", "length 3", "truncated 25%", "decoding 80"} <= run.parts
    assert run.state.seconds_left == pytest.approx(1528 * 60 / 6) and run.line.endswith(", 4:14:40 left")
    run.happens({"event": "restart", "phase": "rollout", "stage": 1})  # what was not stored is generated again
    assert run.state.done == (0, 1536, "groups") and run.state.tokens_per_second is None
    assert "length" not in run.line


def test_an_evaluation_within_a_phase_has_its_own_counts(tmp_path):
    run = Watched(tmp_path)
    run.happens(start("rollout", 1), report(groups=8, prompts=16, seconds=4) | {"event": "evaluation_progress"})
    assert run.state.done == (8, 16, "prompts") and run.state.seconds_left == 4
    assert run.line.startswith("stage 2/3 rollout: evaluating, 8/16 prompts")
    run.happens({"event": "evaluation", "update": 96, "suite": "heldout", "accuracy": 0.5, "ci95": [0.4, 0.6]})
    run.happens(report(groups=1))
    assert run.state.done == (1, 1536, "groups") and "evaluating" not in run.line


def test_progress_of_an_optimize_phase_goes_back_when_metrics_are_cut(tmp_path, monkeypatch):
    noise, now = random.Random(0), time.time()
    updates = [update_record(n, 96, noise) for n in range(1, 140)]
    updates[-1] |= {"staleness": 6, "loss": 0.25, "grad_norm": 1.5, "ess": 0.875, "clip_fraction": 0.125}
    monkeypatch.setattr(time, "time", lambda: now)
    run = Watched(tmp_path)
    run.happens(start("optimize", 1, now - 75))
    run.append("metrics.jsonl", *updates)
    state = run.state
    assert state.done == (43, 96, "updates") and state.updates[-1]["update"] == 139
    assert {"elapsed 1:15", "lag 6", "loss 0.25", "grad_norm 1.5", "ess 0.875", "clipped 0.125"} <= run.parts
    assert state.tokens_per_second == pytest.approx(20000)
    assert state.seconds_left == pytest.approx(5.3)
    assert state.reward == pytest.approx(sum(u["reward/mean"] for u in updates[-32:]) / 32)
    write_lines(tmp_path / "metrics.jsonl", updates[:100])  # back to the checkpoint
    state.poll()
    assert state.done == (4, 96, "updates")
    assert [u["update"] for u in state.updates] == [97, 98, 99, 100], "undone updates do not count for the speed"


def test_events_and_the_state_have_plain_lines(tmp_path, monkeypatch):
    """Of a run that was under way when the display began; looking at it again shows nothing twice."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    run, recipe, stream, noise = Watched(tmp_path), make_recipe(), io.StringIO(), random.Random(0)
    run.happens({"event": "evaluation", "update": 0, "suite": "heldout", "accuracy": 0.123, "ci95": [0.1, 0.15]})
    with Progress(tmp_path, recipe, stream) as view:
        for event in make_events(recipe):
            if event["event"] == "phase_end" and event["phase"] == "optimize":
                first = 96 * event["stage"] + 1
                run.append("metrics.jsonl", *(update_record(n, 96, noise) for n in range(first, first + 96)))
                view._look()
            run.happens(event | {"time": time.time()})
            view._look()
        run.happens({"event": "restart", "stage": 2, "phase": "optimize", "cause": "\x1b[2J", "time": time.time()})
    text = stream.getvalue()
    lines = text.splitlines()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d [ -~]+", line) for line in lines), "no control characters"
    assert "0.123 +-" not in text, "events from before the start are not announced again"
    for expected in (
        "stage 1/3 rollout starts",
        "stage 1/3 rollout done in 0:11",
        "stage 3/3 optimize done in 0:15",
        "held-out accuracy 0.281 +- 0.028 (1024 prompts), base model",
        "held-out accuracy 0.902 +- 0.018 (1024 prompts), after 288 updates",
        "96/96 updates, reward 0.",
        r"stage 3/3 optimize restarts: \x1b[2J",
    ):
        assert expected in text, expected


def test_at_most_one_line_about_the_state_comes_per_interval(tmp_path):
    stream = io.StringIO()
    view = Progress(tmp_path, make_recipe(), stream)
    Watched(tmp_path).happens(start("optimize", 0))
    for due in (0, 1):
        for _ in range(1000):
            view._look()
        assert len(stream.getvalue().splitlines()) == 1 + due  # the first line is that of the event
        view._next = 0
    assert describe_state(view._state) in stream.getvalue()


def test_progress_ends_when_the_block_fails(tmp_path):
    stream, threads = io.StringIO(), threading.active_count()

    def fail():
        with Progress(tmp_path, make_recipe(), stream):
            Watched(tmp_path).happens(start("rollout", 0), {"event": "phase_failed", "phase": "rollout", "stage": 0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "stage 1/3 rollout failed" in stream.getvalue() and threading.active_count() == threads
