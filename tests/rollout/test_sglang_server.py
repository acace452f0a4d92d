"""An SGLang replica without SGLang: arguments, environment, GPUs, failures, responses."""

import itertools
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megarl.rollout.continuous import Running, Settings
from megarl.rollout.engine import EngineFault, fault
from megarl.rollout.sglang.engine import SglangEngine, _environment, server_arguments
from megarl.rollout.sglang.server import ServerFailed, installed_version, server_environment
from tests.rollout.tiny_models import save

WITHOUT_SGLANG = Path(sys.executable)


def test_a_server_that_cannot_start_says_why(tmp_path, capfd):
    model = save(tmp_path / "model", "qwen3")
    before = set(psutil.Process().children())
    with pytest.raises(ServerFailed, match=r"did not start and ended with exit code 1(?s:.)*No module named .*sglang"):
        SglangEngine(model, 0, Settings("cpu", context=64, responses=4, python=WITHOUT_SGLANG))
    assert "No module named" in capfd.readouterr().err  # stderr goes to the log of the rank
    assert set(psutil.Process().children()) <= before
    assert installed_version(WITHOUT_SGLANG) is None


def test_on_gpus_memory_fraction_and_deterministic_mode_are_left_to_sglang_by_default(tmp_path, monkeypatch):
    settings = Settings("cuda", context=64, responses=4)
    plain, seeds = server_arguments(tmp_path, 0, settings), set()
    assert "--mem-fraction-static" not in plain and "--enable-deterministic-inference" not in plain
    assert "--enable-deterministic-inference" in server_arguments(tmp_path, 0, replace(settings, device="cpu"))
    for rank, version in itertools.product(range(8), (0, 1024)):  # no two replicas draw the same random numbers
        monkeypatch.setenv("RANK", str(rank))
        arguments = server_arguments(tmp_path, version, settings)
        seeds.add(int(arguments[arguments.index("--random-seed") + 1]))
    assert len(seeds) == 16 and max(seeds) < 2**31


def completion_of_last_event(limit, **changes):
    """The completion that an engine makes of SGLang's last event of a response with two tokens of version 7.

    limit: the most tokens of the response. changes: fields of the event's meta_info to replace.
    """
    engine = object.__new__(SglangEngine)
    experts = "routed_experts" in changes
    engine.settings = Settings("cuda", context=4096, responses=512, memory_fraction=0.3, routed_experts=experts)
    engine._hf = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "num_experts": 9, "sparse_layers": [0]}
    engine.version = 7
    engine._done = engine._done_tokens = 0
    info = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
        "weight_versions": [{"version": "7"}],
    }
    running = Running(0, 0, 0, tokens=[1, 2, 3], seed=0, done=0, limit=limit, timeout=60.0)
    return engine._ended(running, {"output_ids": [5, 6], "meta_info": info | changes})[1]


def test_a_response_cut_short_by_a_full_cache_is_an_error():
    whole = completion_of_last_event(limit=2)
    assert (whole.tokens.tolist(), whole.logprobs.tolist(), whole.finish_reason) == ([5, 6], [-1.0, -2.0], "length")
    with pytest.raises(EngineFault, match=r"after 2 of 9 tokens.*memory_fraction \(0\.3\)"):
        completion_of_last_event(limit=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_logprobs": [[-1.0, 5, None], [-2.0, 8, None]]}, "2 log-probs, which belong to other tokens"),
        ({"output_token_logprobs": [[-1.0, 5, None]]}, "2 tokens with 1 log-probs"),
        ({"routed_experts": "AAAAAA=="}, "record of routed experts cannot be read: cannot reshape"),
        ({"routed_experts": "AAAAAAEAAAA="}, r"experts of the shape \(1, 1, 2\), not \(4, 1, 2\)"),
    ],
)
def test_a_response_with_what_belongs_to_other_tokens_is_made_again(changes, message):
    assert re.search(message, fault(completion_of_last_event(2, **changes), 2, 10))


def test_log_probs_of_other_weights_are_an_error():
    with pytest.raises(RuntimeError, match="weights of version 6, 7 instead of 7"):
        completion_of_last_event(2, weight_versions=[{"version": "6"}, {"version": "7"}])


def test_a_server_inherits_no_variables_that_are_meant_for_its_phase_process(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "MEGARL_STORE", "PYTHONPATH", "HOME"):
        monkeypatch.setenv(name, "7")
    kept = {"HOME", "PATH", "ADDED"}
    other = server_environment(Path("/another/python"), {"ADDED": "1"})
    assert kept <= set(other) <= (set(os.environ) | kept) - {"RANK", "MASTER_PORT", "PYTHONPATH"}
    assert not any(name.startswith("MEGARL_") for name in other)
    assert server_environment(WITHOUT_SGLANG, {})["PYTHONPATH"] == "7"


@pytest.mark.parametrize(("visible", "own"), [("4,5,6,7", "6,7"), (None, "2,3")])
def test_a_replica_gets_the_gpus_of_its_local_rank(monkeypatch, visible, own):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = Settings("cuda", context=64, responses=4, tensor_parallel=2)
    assert _environment(settings)["CUDA_VISIBLE_DEVICES"] == own
