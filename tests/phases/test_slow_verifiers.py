"""Rewards that take longer than the responses: what is scored is stored meanwhile, and a stop waits for no verifier."""

import signal

import pytest

from tests.helpers import megarl, read_lines, start_megarl, wait_for

pytestmark = pytest.mark.crash

SLOW = """
import os, time
def score(prompt, response, row):
    with open({log!r}, "a") as log:
        log.write(f"{{prompt}} {{response!r}}\\n")
    while not os.path.exists({go!r}) and sum(1 for _ in open({log!r})) > {quick}:
        time.sleep(0.02)
    return float(len(response) % 2)
"""


@pytest.mark.parametrize("phase", ["rollout", "evaluate"])
def test_what_is_scored_is_stored_and_a_stop_waits_for_nothing(recipe, tmp_path, phase):
    run, score, go = tmp_path / "run", tmp_path / "score.py", tmp_path / "go"
    score.write_text(SLOW.format(log=str(tmp_path / "scored"), go=str(go), quick=18))
    settings = [
        *("rollout.groups_per_chunk=1", "schedule.stages=1", "schedule.updates_per_stage=4"),
        *("reward.kind=python", f"reward.path={score}:score", "reward.require_stop=false"),
        *(("eval.every=0",) if phase == "rollout" else ("eval.every=1", "eval.prompts=24", "eval.samples=2")),
    ]
    arguments = ["train", recipe, "--run-dir", run, *(part for one in settings for part in ("--set", one))]
    command = start_megarl(*arguments)
    store = run / ("stages/000/rollouts" if phase == "rollout" else "evaluations/000000/heldout")
    wait_for(command, lambda: list(store.glob("*.arrow")))
    command.send_signal(signal.SIGTERM)
    assert command.wait(25) == 130, command.stderr  # the limit of those that do not end by themselves is 30
    assert list(store.glob("*.arrow"))
    go.touch()
    result = megarl(*arguments)
    assert result.returncode == 0, result.stderr
    (resumed,) = [one for one in read_lines(run / "events.jsonl") if one["event"] == "resume" and one["phase"] == phase]
    assert 0 < resumed["skipped"] < resumed["total"]
