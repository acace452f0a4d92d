"""SGLang's own behaviour: recorded experts, what its server refuses, loads of weights, failures.

Runs after test_contract.py, because the last test ends the server.
"""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megarl.distributed import become_single_process
from megarl.heartbeats import FILE, read_beat
from megarl.phases.rollout import rollout
from megarl.rollout.drift import measure_drift
from megarl.rollout.engine import EngineFault, Request
from megarl.rollout.sglang.server import QUESTION_SECONDS, ServerFailed
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.helpers import megarl, metrics
from tests.rollout.engines import (
    LONG,
    PROMPTS,
    TOLERANCE,
    generate,
    on,
    reference_of,
    sampling,
    serve,
    stage_recipe,
    started,
)

pytestmark = [pytest.mark.sglang, on(started("qwen3_moe", "sglang"))]


def test_a_stage_is_trained_with_the_experts_that_the_engine_recorded(engine, tiny_model, tmp_path, monkeypatch):
    """On the running server. Before the first update the actor's routers choose the same experts."""
    model = engine.policy_dir
    tables = {
        "model": {"path": str(model), "tokenizer": str(tiny_model)},
        "reward": {"kind": "reasoning_gym", "correct_above": 0.02, "require_stop": False},
        "rollout": {"max_response_tokens": 24, "responses_per_prompt": 6},
        "schedule": {"stages": 1, "updates_per_stage": 3, "prompts_per_update": 4},
        "optimizer": {"lr": 1e-2, "warmup_updates": 1},
        "actor": {"routing_replay": "engine"},
        "run": {"tensorboard": False},
    }
    run = RunDir.create(tmp_path / "run", stage_recipe("sglang", **tables))

    def running_engine(recipe, stage, policy_dir, version, routed_experts):
        assert (stage, routed_experts) == (0, True)
        assert policy_dir == run.root / ".policy_0000", "the same path in every stage"
        engine.load_weights(policy_dir, version)
        return engine

    monkeypatch.setattr("megarl.phases.rollout_worker.build_engine", running_engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    become_single_process()
    copy_policy(model, tiny_model, run.stage(0).policy)
    rollout(run.stage(0))
    engine.load_weights(model, 3)  # as the following tests expect
    for group in RolloutStore(run.stage(0).rollouts).read(range(12)):
        for response in group.responses:
            shape = (len(group.prompt_tokens) + len(response.tokens) - 1, 2, 2)
            assert (response.routed_experts.shape, response.routed_experts.dtype) == (shape, "int8")
            assert response.routed_experts.min() >= 0
    optimized = megarl("optimize", run.root, "--stage", "0")
    assert optimized.returncode == 0, optimized.stderr
    first, *later = metrics(run)
    assert first["routing/disagreement"] == 0
    assert 0 < first["m2/all"] < TOLERANCE**2  # the log-ratio is the difference of two implementations
    assert [update["staleness"] for update in later] == [1, 2]
    assert later[0]["grad_norm"] > 0 and 0 < later[1]["routing/disagreement"] < 0.5


def server_processes():
    """The processes of the running server and its guard."""
    below = psutil.Process().children(recursive=True)
    return {process for process in below if any("sglang" in part or "guard" in part for part in process.cmdline())}


def test_signals_that_stop_a_run_do_not_end_the_server(engine):
    """A scheduler sends them to every process of a job; without its server a phase would lose what was decoded."""
    processes = server_processes()
    assert len(processes) >= 4  # guard, server, scheduler and detokenizer
    guard = engine._server._process.pid  # `end_sessions` waits for the guard, since it stays in this session
    assert (os.getsid(guard), os.getpgid(guard)) == (os.getsid(0), guard)
    for process in processes:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
    stop = iter([False, False])
    found = [c for _, c in serve(engine, [Request([[8]], sampling([[8]], tokens=LONG))], lambda: next(stop, True))]
    assert [c.finish_reason for c in found] == ["interrupted"] * 3
    assert len(generate(engine, [[8]], sampling([[8]]))) == 3
    assert all(process.is_running() for process in processes)


def test_the_server_requires_a_key_that_no_command_line_shows(engine):
    server = engine._server
    key = server._key
    (file,) = Path(engine._folder.name).glob("*.yaml")
    assert key in file.read_text() and file.stat().st_mode & 0o77 == 0
    assert not any(key in part for process in server_processes() for part in process.cmdline())
    for wrong in ("", "0" * 64):
        server._key = wrong
        for path in ("/generate", "/flush_cache", "/update_weights_from_disk"):
            with pytest.raises(ServerFailed, match=rf"refused {path} \(401\)"):
                server.post(path, {})
    server._key = key
    assert len(generate(engine, [[8]], sampling([[8]]))) == 3


def test_a_directory_that_sglang_cannot_load_leaves_its_weights_unchanged(engine, tmp_path):
    version = engine.version
    (tmp_path / "config.json").write_text((engine.policy_dir / "config.json").read_text())
    with pytest.raises(EngineFault, match=f"SGLang cannot load the policy in {tmp_path}"):
        engine.load_weights(tmp_path, 8)
    assert engine.version == version
    assert measure_drift(engine, reference_of(engine.policy_dir)).max < TOLERANCE


def test_a_server_that_does_not_answer_gives_no_heartbeat(engine, tmp_path, monkeypatch):
    """Here its scheduler is suspended, which looks from outside like one that hangs."""
    signs, seen = tmp_path / "beats", []
    monkeypatch.setenv(FILE, str(signs))
    (scheduler,) = [p for p in server_processes() if p.cmdline()[0].startswith("sglang::scheduler")]

    def look():
        """The callback ``interrupted``, which the engine calls repeatedly while it waits for the server."""
        sign = read_beat(signs)
        if sign and scheduler.status() != psutil.STATUS_STOPPED and not seen:  # it decodes
            scheduler.suspend()
        elif sign and scheduler.status() == psutil.STATUS_STOPPED:
            seen.append((time.monotonic(), sign.number))
            if len(seen) > 40 and seen[-1][0] > seen[0][0] + 4 * QUESTION_SECONDS:
                scheduler.resume()
        return False

    responses = list(serve(engine, [Request([[8]], sampling([[8]], tokens=LONG))], look))
    assert len(responses) == 3
    assert len({number for _, number in seen[20:]}) == 1  # by then all that was under way has arrived
    deadline = time.monotonic() + 60
    while not engine._server.answers():
        assert time.monotonic() < deadline


def test_a_killed_scheduler_is_an_error_with_the_end_of_the_log(engine):
    servers = server_processes()
    (scheduler,) = [process for process in servers if process.cmdline()[0].startswith("sglang::scheduler")]
    scheduler.kill()
    with pytest.raises(ServerFailed, match="the SGLang server .* the last lines of its log:\n(?s:.)*scheduler"):
        generate(engine, PROMPTS, sampling(PROMPTS, tokens=LONG))
    assert not any(process.is_running() for process in servers)
