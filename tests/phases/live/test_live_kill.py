"""SIGKILL to trainers and engines of a live stage: nothing stored is lost, nothing is trained twice."""

import random
import signal

import pytest

from megarl.storage.ledger import LEDGER, parse
from tests.extent import EVERY
from tests.helpers import metrics, processes_of, stop_and_release
from tests.phases.commands import start_held
from tests.phases.live.conftest import go_on, histogram
from tests.phases.live.test_live import groups, weights

pytestmark = pytest.mark.crash

KILLS, UPDATES = (20, 96) if EVERY else (6, 24)  # more updates than as many killed attempts make
SETTINGS = {"kind": "live", "stages": 1, "updates_per_stage": UPDATES, "sync_every": 2, "prompts_per_update": 2}
DELAYED = SETTINGS | {"delay": 1, "rollout__groups_per_chunk": 2}
FREE = SETTINGS | {"max_lag": 8, "partial": True, "rollout__groups_per_chunk": 4}
UPDATE = r"open .*/metrics\.jsonl ab"  # from the second on; the first is the trainer's start
MOMENTS = (  # before a kill: a process is held at the last of so many file operations
    (r"open .*/rank_000{}\.log", (1,)),  # the start
    (r"replace .*\.arrow", (2,)),
    (r"open .*/rollouts/\..*\.tmp", (1,)),
    (UPDATE, (1, 2, 3)),
    (r"open .*/policies/\..*\.tmp/.", (1,)),
    (r"open .*/checkpoints/\..*\.tmp/.", (1,)),
)


def start(run, pattern, count):
    """Continue the run until it is held: the command, the file that releases it, its trainer and its engine."""
    marker = run.root.with_name("held")
    marker.unlink(missing_ok=True)
    recipe = run.root / "recipe.toml"
    command, held = start_held(marker, pattern, count, "train", recipe, "--run-dir", run.root)
    ranks = sorted(processes_of(command.pid, "live"), key=lambda process: process.name())
    return command, marker, ranks if len(ranks) == 2 else [held, held]  # they have no names yet


def disturb(run, kills, seed):
    rng = random.Random(seed)
    for number in range(kills):  # the trainer and the engine in turn
        pattern, counts = MOMENTS[number // 2 % len(MOMENTS)]
        command, marker, ranks = start(run, pattern.format(number % 2), rng.choice(counts))
        ranks[number % 2].kill()
        marker.write_text("")
        assert command.wait() == 1, command.stderr
    go_on(run)


def check_exactly_once(run):
    ledger, _ = parse(run.stage(0).rollouts / LEDGER)
    assert sorted(group for entry in ledger for group in entry.groups) == list(run.stage(0).groups)
    assert run.stage(0).is_sealed()
    assert [update["update"] for update in metrics(run)] == list(range(1, UPDATES + 1))
    assert list(run.root.rglob(".*.tmp")) == []
    assert run.versions() == []


def test_a_delayed_stage_ends_with_the_same_bytes_after_a_stop_and_kills(new_run):
    undisturbed, run = (new_run(name, actor__checkpoint_every=9, **DELAYED) for name in ("undisturbed", "disturbed"))
    go_on(undisturbed)
    command, marker, _ = start(run, UPDATE, 5)
    stop_and_release(command, signal.SIGTERM, marker)
    assert command.wait() == 130, command.stderr
    assert 4 <= len(metrics(run)) < UPDATES
    saved = max(int(path.name[7:]) for path in run.stage(0).checkpoints.glob("update_*"))
    assert saved == len(metrics(run))  # also between two regular checkpoints
    disturb(run, kills=KILLS, seed=0)
    check_exactly_once(run)
    assert weights(run.final) == weights(undisturbed.final)
    for path in undisturbed.stage(0).rollouts.iterdir():
        assert (run.stage(0).rollouts / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_free_running_stage_with_partial_responses_trains_each_group_once_after_kills(new_run):
    run = new_run("run", actor__checkpoint_every=4, **FREE)
    disturb(run, kills=KILLS * 2 // 5, seed=1)
    check_exactly_once(run)
    assert max(histogram(metrics(run))) <= 8
    for number, group in enumerate(groups(run)):
        assert all(0 <= number // 2 - response.versions[0] <= 8 for response in group.responses)
