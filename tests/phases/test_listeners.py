"""On one machine nothing listens but gloo of several trainers and servers of engines (tests/rollout), on loopback."""

import contextlib

import psutil
import pytest

from tests.phases.commands import settings, start_held

SMALL = ("schedule.stages=1", "schedule.updates_per_stage=4", "schedule.prompts_per_update=2", "eval.every=1")
LIVE = ("schedule.kind=live", "schedule.sync_every=2", "schedule.max_lag=4")
MOMENTS = {
    "rollout": (r"replace .*/rollouts/.*\.arrow", ()),
    "evaluate": (r"replace .*/evaluations/.*\.arrow", LIVE),
    "optimize": ("open .*/checkpoints/.*", ()),
    "live": ("open .*/checkpoints/.*", LIVE),
}


def listeners(process):
    """{name of a process: addresses at which it listens} of a process and its descendants."""
    found = {}
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(one.name(), set()).add(connection.laddr.ip)
    return found


@pytest.mark.parametrize("phase", MOMENTS)
def test_only_gloo_between_trainers_listens_and_only_on_loopback(phase, recipe, tmp_path):
    operation, others = MOMENTS[phase]
    wanted = settings(*SMALL, *others, "actor.processes_per_node=2")
    command, _ = start_held(tmp_path / "held", operation, 1, "train", recipe, "--run-dir", tmp_path / "run", *wanted)
    try:
        found = listeners(psutil.Process(command.pid))
    finally:
        command.kill()
        command.wait()
    trainers = {f"{phase}:{rank}" for rank in (0, 1)} if phase in ("optimize", "live") else set()
    assert trainers & set(found) == trainers, found  # the phase has begun
    assert set(found) <= trainers | {"checkpoint"}, found
    assert all(addresses == {"127.0.0.1"} for addresses in found.values()), found
