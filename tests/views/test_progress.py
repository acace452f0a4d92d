"""The progress display follows files that grow, are cut or are replaced."""

import io
import json
import os
import random
import re
import threading
import time

import pytest

from megarl.recipe.load import override_recipe
from megarl.storage import checked_json
from megarl.views import progress
from megarl.views.progress import Progress, describe_state
from megarl.views.run_state import RunState
from tests.views.synthetic_run import make_events, make_recipe, make_run, update_record, write_lines


def append(path, *records, torn=""):
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) + torn)


def start(phase, stage, when=None):
    return {"time": when or time.time(), "event": "phase_start", "phase": phase, "stage": stage}


def report(**fields):
    return {"time": time.time(), "event": "rollout_progress", "stage": 1, "rank": 0} | fields


def test_progress_speed_and_reward_of_a_rollout_phase(tmp_path):
    recipe = make_recipe()
    state = RunState(tmp_path, recipe)
    assert state.poll() == [] and state.done == (0, 0, "")
    rollouts = tmp_path / "stages/001/rollouts"
    rollouts.mkdir(parents=True)
    shard = {"groups": [1536, 1537], "responses": 16, "tokens": 100, "reward_sum": 4.0}
    append(rollouts / "ledger.jsonl", {"shard": "old", **shard})  # of an earlier attempt, which was killed
    append(tmp_path / "events.jsonl", start("rollout", 1, time.time() - 10))
    assert [event["event"] for event in state.poll()] == ["phase_start"]
    assert state.done == (2, 1536, "groups") and state.tokens_per_second is None and state.seconds_left is None
    append(rollouts / "ledger.00001.jsonl", {"shard": "b", **shard, "reward_sum": 12.0}, torn='{"shard": "c"')
    state.poll()
    assert state.done == (4, 1536, "groups") and state.reward == 0.5
    append(rollouts / "x", {"shard": "old", **shard}, {"shard": "b", **shard, "reward_sum": 12.0})
    os.replace(rollouts / "x", rollouts / "ledger.jsonl")  # sealing merges the ledgers into one
    state.poll()
    assert state.done == (4, 1536, "groups")


def test_responses_tokens_and_time_left_are_shown_while_a_chunk_is_generated(tmp_path):
    """Nothing of the chunk is stored yet; of 1536 groups of 8 an earlier attempt has stored 2."""
    state = RunState(tmp_path, make_recipe())
    (tmp_path / "stages/001/rollouts").mkdir(parents=True)
    append(tmp_path / "stages/001/rollouts/ledger.jsonl", {"shard": "old", "groups": [1536, 1537]})
    append(tmp_path / "events.jsonl", start("rollout", 1))
    append(tmp_path / "events.jsonl", report(ended=0, tokens=0, decoding=100, decoding_tokens=200, tokens_per_second=4))
    state.poll()
    longest = make_recipe().rollout.max_response_tokens
    assert state.done[0] == 2 and state.reward is None
    assert {"4 tokens/s", "decoding 100 at token 2"} <= set(describe_state(state).split(", "))
    assert state.seconds_left == pytest.approx((1534 * 8 * longest - 200) / 4, rel=1e-3)
    inside = {"decoding": 40, "decoding_tokens": 160, "tokens_per_second": 5}
    one = report(ended=60, tokens=180, groups=3, responses=24, truncated=6, reward_sum=6.0, **inside)
    append(tmp_path / "events.jsonl", one, one | {"rank": 1})
    state.poll()
    assert state.done == (8, 1536, "groups") and state.reward == 0.25
    shown = set(describe_state(state).split(", "))
    assert {"10 tokens/s", "responses 120", "length 3", "truncated 25%", "decoding 80 at token 4"} <= shown
    length = (180 + 40 * longest) / 100
    assert state.seconds_left == pytest.approx((1534 * 8 * length - 680) / 10, rel=1e-3)
    append(tmp_path / "stages/001/rollouts/ledger.jsonl", {"shard": "a", "groups": [0, 1], "responses": 16})
    append(tmp_path / "events.jsonl", {"event": "restart", "phase": "rollout", "stage": 1})
    state.poll()
    # what was not stored is generated again
    assert state.done == (4, 1536, "groups") and state.tokens_per_second is None
    assert "length" not in describe_state(state)


def test_candidates_and_chosen_groups_of_dynamic_sampling_and_warnings_are_shown(tmp_path):
    recipe = override_recipe(make_recipe(), ["rollout.oversample=1.5"])
    state = RunState(tmp_path, recipe)
    append(tmp_path / "events.jsonl", start("rollout", 1))
    state.poll()
    assert state.done == (0, 2304, "candidates")
    choice = {"event": "dynamic_sampling", "phase": "rollout", "stage": 1, "generated": 1900, "chosen": 1536}
    append(tmp_path / "events.jsonl", choice | {"filled": 0}, choice | {"filled": 7})
    drift = {"event": "weight_drift", "phase": "rollout", "stage": 0}
    append(tmp_path / "events.jsonl", *(drift | {"rank": rank, "warning": "far off"} for rank in (1, 0)))
    append(tmp_path / "events.jsonl", drift | {"rank": 0, "warning": ""})
    lines = [progress.describe_event(event, state) for event in state.poll()]
    assert list(filter(None, lines)) == [
        "stage 2/3 rollout chose 1536 of 1900 groups",
        "stage 2/3 rollout chose 1536 of 1900 groups, 7 of them without variance",
        "stage 1/3 rollout: far off",
    ]


def test_loading_and_evaluation_before_generation_are_shown_and_do_not_count_for_the_speed(tmp_path, monkeypatch):
    state, now = RunState(tmp_path, make_recipe()), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    loaded = {"event": "weight_drift", "stage": 1, "time": now - 30.0, "rank": 0}
    append(tmp_path / "events.jsonl", start("rollout", 1, now - 90.0))
    state.poll()
    assert describe_state(state).startswith("stage 2/3 rollout: loading weights, 1:30")
    append(tmp_path / "events.jsonl", loaded | {"phase": "evaluate"})
    state.poll()
    assert describe_state(state).startswith("stage 2/3 rollout: evaluating")
    accuracy = {"event": "evaluation", "stage": 1, "accuracy": 0.5, "time": now - 10.0}
    append(tmp_path / "events.jsonl", accuracy, loaded | {"phase": "evaluate", "rank": 1}, report())
    (tmp_path / "stages/001/rollouts").mkdir(parents=True)
    state.poll()
    append(tmp_path / "stages/001/rollouts/ledger.jsonl", {"shard": "a", "groups": [1], "responses": 2, "tokens": 1000})
    state.poll()
    assert describe_state(state).startswith("stage 2/3 rollout, 1/")
    append(tmp_path / "events.jsonl", {"event": "restart", "phase": "rollout", "stage": 1})
    state.poll()
    assert "loading" in describe_state(state)
    append(tmp_path / "events.jsonl", loaded | {"phase": "rollout"})
    state.poll()
    assert describe_state(state).startswith("stage 2/3 rollout, 1/")


SUITES = ("eval.every_updates=48", 'eval.suites=[{name="one", prompts=20}, {name="two", prompts=8}]')


def test_prompts_are_counted_while_suites_are_evaluated(tmp_path):
    """An earlier attempt has finished the first suite."""
    state = RunState(tmp_path, override_recipe(make_recipe(), list(SUITES)))
    one, two = (tmp_path / f"evaluations/{name}/update_000096" for name in ("one", "two"))
    for place in (one, two):
        place.mkdir(parents=True)
    (one / "SEALED").touch()
    append(two / "ledger.jsonl", {"shard": "a", "groups": [0, 1, 2]})
    drift = {"event": "weight_drift", "stage": 1, "time": time.time(), "rank": 0, "phase": "evaluate"}
    append(tmp_path / "events.jsonl", start("rollout", 1), drift)
    state.poll()
    assert describe_state(state).startswith("stage 2/3 rollout: evaluating two, 3/8 prompts")
    append(two / "ledger.00001.jsonl", {"shard": "b", "groups": [3, 4]}, {"shard": "c", "groups": [5]})
    state.poll()
    assert state.done == (6, 8, "prompts")
    append(tmp_path / "events.jsonl", report())
    state.poll()
    assert describe_state(state).startswith("stage 2/3 rollout, 0/1536 groups")
    (two / "SEALED").touch()
    append(tmp_path / "events.jsonl", start("evaluate", 3), drift | {"stage": 3})  # a phase of its own
    place = tmp_path / "evaluations/one/update_000288"
    place.mkdir()
    append(place / "ledger.jsonl", {"shard": "a", "groups": [0, 1, 2]})
    state.poll()
    assert describe_state(state).startswith("final evaluation, 3/20 prompts")


@pytest.mark.parametrize(("phase", "stage"), [("rollout", 1), ("evaluate", 3)])
def test_responses_tokens_and_time_left_are_shown_while_a_suite_is_evaluated(tmp_path, phase, stage):
    """Two of 16 prompts have ended, of which each has one response; none is stored. The recipe asks for 20."""
    state = RunState(tmp_path, override_recipe(make_recipe(), list(SUITES)))
    (tmp_path / f"evaluations/one/update_{stage * 96:06d}").mkdir(parents=True)
    loaded = {"event": "weight_drift", "stage": stage, "time": time.time(), "rank": 0, "phase": "evaluate"}
    inside = {"prompts": 16, "decoding": 14, "decoding_tokens": 28, "tokens_per_second": 8}
    one = report(ended=2, tokens=4, groups=2, responses=2, truncated=1, reward_sum=2.0, **inside)
    append(tmp_path / "events.jsonl", start(phase, stage), loaded, one | {"event": "evaluation_progress"})
    state.poll()
    assert state.done == (2, 16, "prompts") and state.reward is None and state.run_seconds_left is None
    shown = set(describe_state(state).split(", "))
    assert {"2/16 prompts", "8 tokens/s", "responses 2", "length 2", "truncated 50%", "decoding 14 at token 2"} <= shown
    left = 14 * make_recipe().rollout.max_response_tokens - 28
    assert state.seconds_left == pytest.approx(left / 8, rel=1e-2)
    done = {"event": "evaluation", "accuracy": 0.5, "update": stage * 96, "suite": "one", "stage": stage}
    append(tmp_path / "events.jsonl", done)
    state.poll()
    assert state.of_replicas("ended") == 0 and state.tokens_per_second is None


def test_progress_of_an_optimize_phase_goes_back_when_metrics_are_cut(tmp_path, monkeypatch):
    recipe, noise = make_recipe(), random.Random(0)
    updates = [update_record(n, 96, noise) for n in range(1, 140)]
    values = {"staleness": 6, "loss": 0.25, "grad_norm": 1.5, "ess": 0.875, "clip_fraction": 0.125}
    updates[-1] |= values
    state, now = RunState(tmp_path, recipe), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    append(tmp_path / "events.jsonl", start("optimize", 1, now - 75))
    append(tmp_path / "metrics.jsonl", *updates)
    state.poll()
    assert state.done == (43, 96, "updates") and state.updates == 139
    shown = describe_state(state).split(", ")
    assert {"elapsed 1:15", "lag 6", "loss 0.25", "grad_norm 1.5", "ess 0.875", "clipped 0.125"} <= set(shown)
    assert state.tokens_per_second == pytest.approx(20000)
    assert state.seconds_left == pytest.approx(5.3)
    assert state.reward == pytest.approx(sum(u["reward/mean"] for u in updates[-32:]) / 32)
    write_lines(tmp_path / "metrics.jsonl", updates[:100])  # back to the checkpoint
    state.poll()
    assert state.done == (4, 96, "updates")
    write_lines(tmp_path / "metrics.jsonl", updates[:10])
    state.poll()
    assert [u["update"] for u in state.recent] == [*range(1, 11)], "updates that were undone do not count for the speed"


def test_a_whole_run_leaves_durations_and_accuracies(tmp_path):
    state = RunState(tmp_path, make_recipe())
    write_lines(tmp_path / "events.jsonl", make_events(make_recipe())[:7])  # up to the end of stage 0
    state.poll()
    assert state.seconds == {"evaluate": 4.0, "rollout": 11.0, "optimize": 17.0}
    assert state.accuracies[0][0] == pytest.approx(0.281)


def test_events_and_the_state_have_plain_lines(tmp_path, monkeypatch):
    """Of a run that was under way when the display began; looking at it again shows nothing twice."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    recipe, stream, noise = make_recipe(), io.StringIO(), random.Random(0)
    append(tmp_path / "events.jsonl", {"event": "evaluation", "stage": 0, "accuracy": 0.123, "ci95": [0.1, 0.15]})
    with Progress(tmp_path, recipe, stream) as view:
        for event in make_events(recipe):
            if event["event"] == "phase_end" and event["phase"] == "optimize":
                first = 96 * event["stage"] + 1
                append(tmp_path / "metrics.jsonl", *(update_record(n, 96, noise) for n in range(first, first + 96)))
                view._look()
            append(tmp_path / "events.jsonl", event | {"time": time.time()})
            view._look()
        hostile = {"event": "restart", "stage": 2, "phase": "optimize", "cause": "\x1b[2J", "time": time.time()}
        append(tmp_path / "events.jsonl", hostile)
    lines = stream.getvalue().splitlines()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d [ -~]+", line) for line in lines), "no control characters"
    text = stream.getvalue()
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
    append(tmp_path / "events.jsonl", start("optimize", 0))
    for due in (0, 1):
        for _ in range(1000):
            view._look()
        assert len(stream.getvalue().splitlines()) == 1 + due  # the first line is that of the event
        view._next = 0
    assert describe_state(view._state) in stream.getvalue()


def test_progress_ends_when_the_block_fails(tmp_path):
    stream, threads = io.StringIO(), threading.active_count()
    failure = {"event": "phase_failed", "phase": "rollout", "stage": 0}

    def fail():
        with Progress(tmp_path, make_recipe(), stream):
            append(tmp_path / "events.jsonl", start("rollout", 0), failure)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "stage 1/3 rollout failed" in stream.getvalue() and threading.active_count() == threads


def test_following_a_long_run_costs_next_to_nothing(tmp_path, monkeypatch):
    """A poll of a run with 60,000 updates decodes the new lines only, not those already read."""
    root = make_run(tmp_path / "run")
    line = (root / "metrics.jsonl").read_text().splitlines()[0] + "\n"
    with open(root / "metrics.jsonl", "a") as file:
        for _ in range(60):
            file.write(line * 1000)
    state = RunState(root, make_recipe())
    state.poll()
    decoded, decode = [], checked_json.decode
    monkeypatch.setattr(checked_json, "decode", lambda *a, **b: decoded.append(a) or decode(*a, **b))
    for _ in range(100):
        append(root / "metrics.jsonl", json.loads(line))
        state.poll()
        describe_state(state)
    assert len(decoded) == 100
