"""Verifiers slower than the engine: scored groups are stored meanwhile, and a stop does not wait for the others."""

import os
import signal
from pathlib import Path

import pytest

from megarl.data.prompts import open_prompts
from megarl.heartbeats import read_beat
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from tests.helpers import events, processes_of, start_megarl, wait_for
from tests.phases.commands import settings, succeed

pytestmark = pytest.mark.crash

GROUPS = 16
SCORE = """
import time
from pathlib import Path
HERE = Path({here!r})
WAITS = {waits!r}  # of each prompt: a file without which its responses are not scored
def score(prompt, response, row):
    time.sleep(0.02)  # so that a score is sent as soon as it is known
    while prompt in WAITS and not (HERE / WAITS[prompt]).exists():  # another prompt is tried before the run
        time.sleep(0.02)
    return float(len(response) % 2)
"""


def test_scored_groups_are_stored_and_a_stop_does_not_wait_for_verifiers(recipe, tmp_path):
    run, score = tmp_path / "run", tmp_path / "score.py"
    wanted = settings(
        *("rollout.groups_per_chunk=1", "schedule.stages=1", "schedule.updates_per_stage=4", "eval.every=0"),
        *("reward.kind=python", f"reward.path={score}:score", "reward.require_stop=false"),
    )
    score.write_text("def score(prompt, response, row): ...")
    plain = load_recipe(recipe, wanted[1::2])
    assert plain.groups_per_stage == GROUPS
    prompts = open_prompts(plain, plain.model.path)[1]
    waits = {prompts.train(group).text: "first" if group < 8 else "rest" for group in range(GROUPS)}
    score.write_text(SCORE.format(here=str(tmp_path), waits=waits))

    def stored():
        return len(list((run / "stages/000/rollouts").glob("*.arrow")))

    def scores():
        open_files = [file.path for process in processes_of(command.pid, "rollout") for file in process.open_files()]
        beats = [read_beat(Path(path)) for path in open_files if path.endswith(".beats")]
        return any(beat is not None and beat.kind == "scoring" for beat in beats)

    arguments = ["train", recipe, "--run-dir", run, *wanted]
    patient = {**os.environ, "MEGARL_SHUTDOWN_SECONDS": "3600"}  # processes that do not end are not killed in this test
    command = start_megarl(*arguments, env=patient)
    wait_for(command, scores)  # nothing is left to generate
    assert stored() == 0
    (tmp_path / "first").touch()
    wait_for(command, lambda: stored() == 8)
    command.send_signal(signal.SIGTERM)
    assert command.wait(300) == 130, command.stderr
    (tmp_path / "rest").touch()
    succeed(*arguments)
    (resumed,) = events(RunDir.open(run), "resume")
    assert (resumed["skipped"], resumed["total"]) == (8, GROUPS)
