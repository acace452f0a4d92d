"""vLLM's own behaviour: wrong reloads of experts, signals, memory."""

import itertools
import math
import multiprocessing
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.errors import UserError
from megarl.phases.rollout_worker import RolloutWorker
from megarl.rollout import vllm
from megarl.rollout.continuous import Settings
from megarl.rollout.drift import measure_drift
from megarl.rollout.engine import EngineFault, Request, fault
from megarl.storage.policies import write_reference
from megarl.storage.run_dir import RunDir
from tests.helpers import children
from tests.rollout.engines import (
    BOTH,
    CONTEXT,
    PROMPTS,
    TOGETHER,
    TOLERANCE,
    by_response,
    generate,
    on,
    other_policy,
    reference_of,
    sampling,
    serve,
    stage_recipe,
    started,
)

pytestmark = pytest.mark.vllm
VLLM = [parameter for parameter in BOTH if parameter.values[0][0] == "vllm"]
MOE = started("qwen3_moe", "vllm")


def configured(path, float32_head=True, **more):
    """vLLM's configuration for the model in ``path``."""
    from vllm import EngineArgs

    settings = Settings("cpu", context=64, responses=2, float32_head=float32_head)
    return EngineArgs(**vllm.engine_arguments(path, settings) | more).create_engine_config()


@pytest.mark.parametrize(("float32_head", "error"), [(True, 0.0), (False, 2**-9)])
def test_logits_of_a_bfloat16_model_are_rounded_only_without_float32_head(models, float32_head, error):
    """Computed by vLLM's own layer, with the arguments of an engine in bfloat16, as on a GPU."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    with set_current_vllm_config(configured(models["qwen3"][0], float32_head=float32_head, dtype="bfloat16")):
        processor = LogitsProcessor(39)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((8, 64), (39, 64)))
    head = SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod())
    head.cpu_linear = torch.nn.functional.linear
    logits, exact = processor._apply_head(head, hidden, None), hidden.double() @ weight.double().T
    worst = float(((logits - exact) / exact.abs().max()).abs().max())
    assert error / 4 <= worst <= max(2 * error, 1e-6)


def test_stages_have_the_same_key_in_vllms_cache_of_compiled_code(models, tmp_path):
    """Two policies that a replica loads one after the other have it. (vLLM compiles only on GPUs.)"""
    run = RunDir(tmp_path, stage_recipe("vllm", model={"path": "base"}))
    own, shared = set(), set()
    for number, model in enumerate(models["qwen3"]):
        policy = shutil.copytree(model, run.stage(number).policy)
        path = run.under_one_path(policy, rank=3)
        assert path.samefile(policy)
        own.add(configured(policy).compute_hash())
        shared.add(configured(path).compute_hash())
    assert len(shared) == 1 and len(own) == 2, "else the link would not be needed"


@on(MOE)
def test_experts_that_vllms_runner_returns_reach_the_completions(engine, monkeypatch):
    """The runner returns those of each step, here random ones; vLLM's own classes collect them."""
    core, states = engine._engine.engine_core, engine._engine.output_processor.request_states
    get_output, given, experts = core.get_output, {}, np.random.default_rng(0)

    def with_experts(filled=1):
        outputs = get_output()
        for name in states:  # in the order of the prompts and their responses
            given.setdefault(name, [])
        for output in outputs.outputs:
            first = not given[output.request_id]  # the first step computes the whole prompt
            shape = len(states[output.request_id].prompt_token_ids) if first else 1, 2, 8
            output.routed_experts = filled * np.argsort(experts.random(shape))[..., :2].astype(np.uint8)
            given[output.request_id].append(output.routed_experts)
        return outputs

    monkeypatch.setattr(engine, "settings", replace(engine.settings, routed_experts=True))
    monkeypatch.setattr(core, "get_output", with_experts)
    request = Request(PROMPTS[:2], sampling(PROMPTS[:2], tokens=9))
    for last, reason in ((4, "interrupted"), (math.inf, "length")):
        calls = itertools.count()
        completions = [c for _, c in serve(engine, [request], lambda: next(calls) > last)]  # noqa: B023
        assert {c.finish_reason for c in completions} == {reason}
        for c in completions:
            assert c.routed_experts.shape == (len(PROMPTS[c.prompt]) + len(c.tokens) - 1, 2, 2)
        found = by_response(completions)
        whole = [np.concatenate(parts).astype(np.int8).tobytes() for parts in given.values()]
        assert len(set(whole)) == 6 and whole == [found[key].routed_experts.tobytes() for key in sorted(found)]
        given.clear()
    monkeypatch.setattr(core, "get_output", lambda: with_experts(filled=0))
    completions = generate(engine, PROMPTS[:2], request.sampling).values()
    assert all("not filled" in (fault(c, 99, 10**6) or "") for c in completions)


@on(VLLM)
def test_a_wrong_reload_is_noticed_and_repaired(engine, tmp_path):
    """vLLM's reload of experts in place on a CPU is wrong; only the drift check notices it."""
    settings, policy, started = engine.settings, other_policy(engine), engine._engine
    reference, experts = reference_of(policy), bool(started.model_config.get_num_experts())
    engine.settings = replace(settings, device="cuda")  # on GPUs models are reloaded in place
    engine.load_weights(policy, 5)
    assert engine._engine is started, "loaded in place"
    engine.settings = settings
    if experts:
        with pytest.raises(EngineFault, match="weights are not the policy's.* nats off"):
            measure_drift(engine, reference)
    else:
        assert measure_drift(engine, reference).max < TOLERANCE
    write_reference(tmp_path, reference)
    worker = object.__new__(RolloutWorker)
    worker.engine = engine
    assert worker.check_drift(tmp_path, None).max < TOLERANCE
    assert (engine._engine is not started) is experts, "restarted only if the weights were wrong"
    engine.restart()
    assert measure_drift(engine, reference).max < TOLERANCE and not engine.restart()


def test_an_engine_beside_trainers_sleeps_and_wakes_without_a_new_start(models, monkeypatch):
    """vLLM's own sleep mode, from its engine to its worker. On a CPU that worker frees nothing: as after a sleep of
    level 2 on a GPU, its weights are garbage here, and the order of the calls is noted."""
    from vllm import EngineArgs
    from vllm.v1.worker.cpu_worker import CPUWorker

    arguments = vllm.engine_arguments(models["qwen3"][0], Settings("cuda", context=64, responses=2, sleeps=True))
    assert EngineArgs(**arguments).enable_sleep_mode
    calls = []

    def sleep(worker, level):
        calls.append(f"sleep {level}")
        for parameter in worker.get_model().parameters():
            parameter.data.fill_(math.nan)

    reload = CPUWorker.reload_weights
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags: calls.append("wake"))
    monkeypatch.setattr(CPUWorker, "reload_weights", lambda *x, **more: (calls.append("reload"), reload(*x, **more)))
    monkeypatch.setattr(vllm, "_start", lambda *x, start=vllm._start: (calls.append("start"), start(*x))[1])
    engine = vllm.VllmEngine(models["qwen3"][0], 0, Settings("cpu", context=CONTEXT, responses=TOGETHER))
    engine.settings = replace(engine.settings, sleeps=True, device="cuda")
    for version, policy in enumerate(models["qwen3"][::-1], 1):
        engine.sleep()
        engine.sleep()
        engine.load_weights(policy, version)
        assert measure_drift(engine, reference_of(policy)).max < TOLERANCE
    assert calls == ["start", *["sleep 2", "wake", "reload"] * 2]
    engine.close()


def test_tensor_parallel_workers_survive_signals_that_stop_a_run(models):
    """A scheduler sends them to all processes; the engine still returns what was decoded."""
    before = children()
    engine = vllm.VllmEngine(models["qwen3"][0], 0, Settings("cpu", context=120, responses=6, tensor_parallel=2))
    workers = {process for process in children() - before if "Worker" in process.name()}
    assert len(workers) == 2
    calls = itertools.count()

    def stopped():
        if next(calls) == 4:  # some tokens have been decoded
            for process, number in itertools.product(workers, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
                process.send_signal(number)
        return next(calls) > 20

    found = [c for _, c in serve(engine, [Request(PROMPTS[:2], sampling(PROMPTS[:2], tokens=100))], stopped)]
    assert [c.finish_reason for c in found] == ["interrupted"] * 6 and all(len(c.tokens) > 5 for c in found)
    assert all(process.is_running() for process in workers)
    engine.close()
    multiprocessing.active_children()  # joins those that have ended
    assert not any(process.is_running() for process in workers)


@on(MOE)
def test_sleep_too_little_memory_and_waking_with_more_responses_than_fit_in_a_step(engine):
    """An engine with too little memory is an error. One that wakes can serve more prompts than one step holds."""
    engine.sleep()
    with pytest.raises(UserError, match=r"memory.*memory_fraction = 1e-09 .*groups_per_chunk.*max_response_tokens"):
        vllm.VllmEngine(engine.policy_dir, 0, replace(engine.settings, memory_fraction=1e-9))
    engine.settings = replace(engine.settings, responses=100)
    engine.load_weights(engine.policy_dir, engine.version)
    assert measure_drift(engine, reference_of(engine.policy_dir)).max < TOLERANCE
    prompts = [[i % 39] * 53 for i in range(100)]
    assert len(prompts) * 53 > vllm.CPU_STEP
    assert len(generate(engine, prompts, sampling(prompts, samples=1, tokens=2))) == 100
