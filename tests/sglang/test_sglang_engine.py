"""SGLang against the actor and the Hugging Face model; its seeds, limits, queue, weight loads and end.

One server a model. The tests that end it come last.
"""

import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.distributed import become_single_process
from megarl.errors import UserError
from megarl.phases.rollout import rollout
from megarl.recipe.load import parse_recipe
from megarl.rollout import build_engine
from megarl.rollout.drift import check_weights, hugging_face_reference
from megarl.rollout.engine import Request, Sampling, response_seed
from megarl.rollout.sglang.server import ServerFailed
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT
from tests.rollout.tiny_models import save
from tests.sglang.conftest import PYTHON

PROMPTS = [[5, 9, 3, 30, 12, 38, 7], [11, 4], [20, 21, 22, 23], [8], [33, 2, 9, 14], [2, 3, 5, 7, 11, 13, 17, 19, 23]]
TOLERANCE = 1e-4  # nats
CONTEXT = 120  # tokens; the models have 128 positions
LONG = 110  # tokens of a response that does not end by itself meanwhile


def sampling(prompts, samples=3, tokens=10, temperature=1.0, stop=(), seed=0, **more):
    seeds = tuple(response_seed(seed, i, k) for i in range(len(prompts)) for k in range(samples))
    return Sampling(temperature, tokens, samples, stop, seeds, **more)


def by_response(completions):
    completions = list(completions)
    table = {(c.prompt, c.sample): c for c in completions}
    assert len(table) == len(completions)
    return table


@torch.inference_mode()
def hugging_face(path, before, tokens, temperature):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([[*before, *tokens]])
    logprobs = (model(ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[len(before) - 1 :, 0].numpy()


def recipe(**tables):
    """Of a stage that SGLang generates on a CPU."""
    data = {"source": "reasoning_gym", "train": "spell_backward", "options": {"min_word_len": 3, "max_word_len": 8}}
    data |= {"prompt_template": "{word}=", "max_prompt_tokens": 10}
    actor, rollout = {"backend": "cpu"}, {"engine": "sglang", "sglang_python": str(PYTHON)}
    tables = {
        "data": data,
        "reward": {"kind": "reasoning_gym"},
        "eval": {"every": 0},
        **tables,
        "rollout": rollout | tables.get("rollout", {}),
        "actor": actor | tables.get("actor", {}),
    }
    return parse_recipe(tables)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return [save(folder / str(seed), request.param, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(model):
    before = set(psutil.Process().children(recursive=True))
    experts = "moe" in json.loads((model[0] / "config.json").read_text())["model_type"]
    limits = {"max_response_tokens": LONG, "responses_per_prompt": 3, "groups_per_chunk": 2}
    stage = recipe(model={"path": str(model[0])}, rollout=limits)
    engine = build_engine(stage, 0, model[0], 3, routed_experts=experts)
    assert (engine.settings.context, engine.settings.responses) == (CONTEXT, 6)
    assert engine.settings.routed_experts == experts
    yield engine
    engine.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_log_probs_and_experts_are_the_actors_own(engine, model):
    table = by_response(engine.generate(PROMPTS, sampling(PROMPTS)))
    assert sorted(table) == [(i, k) for i in range(len(PROMPTS)) for k in range(3)]
    sequences = [PROMPTS[i] + c.tokens.tolist() for (i, _), c in table.items()]
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.actor_scores", str(model[0])]
    actor = subprocess.run(command, cwd=ROOT, input=json.dumps(sequences), capture_output=True, text=True)
    assert actor.returncode == 0, actor.stderr
    scored = engine.score(sequences)
    for c, answer, own in zip(table.values(), json.loads(actor.stdout.splitlines()[-1]), scored, strict=True):
        assert (c.tokens.dtype, c.logprobs.dtype) == (np.int32, np.float32)
        np.testing.assert_allclose(c.logprobs, answer["logprobs"][-len(c.tokens) :], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(own, answer["logprobs"], rtol=0, atol=TOLERANCE)
        if engine.settings.routed_experts:
            assert c.routed_experts.dtype == np.int8
            np.testing.assert_array_equal(np.sort(c.routed_experts), np.sort(answer["experts"]))
        else:
            assert c.routed_experts is None and answer["experts"] is None


def test_log_probs_are_of_the_distribution_that_was_sampled(engine, model):
    for c in engine.generate(PROMPTS, sampling(PROMPTS, temperature=0.7, samples=1)):
        expected = hugging_face(model[0], PROMPTS[c.prompt], c.tokens, 0.7)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=TOLERANCE)
        assert c.policy_version == 3


def test_nothing_listens_beyond_loopback(engine):
    beyond = [
        connection
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1")
    ]
    assert beyond == []


def test_a_response_follows_from_its_own_seed(engine):
    """Not from its place in the request, nor from what stands beside it."""
    request = sampling([[8]], samples=6)
    forward = by_response(engine.generate([[8]], request))
    assert len({tuple(c.tokens) for c in forward.values()}) == 6
    backward = by_response(engine.generate([[8]], Sampling(1.0, 10, 6, (), request.seeds[::-1])))
    alone = by_response(engine.generate([[8]], Sampling(1.0, 10, 1, (), request.seeds[2:3])))
    for k in range(6):
        assert backward[0, 5 - k].tokens.tolist() == forward[0, k].tokens.tolist()
    assert alone[0, 0].tokens.tolist() == forward[0, 2].tokens.tolist()


def test_stop_tokens_and_length(engine):
    table = by_response(engine.generate(PROMPTS, sampling(PROMPTS, samples=10, stop=(4, 30))))
    for c in table.values():
        stops = np.isin(c.tokens, [4, 30])
        assert not stops[:-1].any()
        assert c.finish_reason == ("stop" if stops[-1] else "length")
        assert len(c.tokens) == len(c.logprobs) and (len(c.tokens) == 10 or c.finish_reason == "stop")
    reasons = [c.finish_reason for c in table.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 5
    longest = [[1] * (CONTEXT - 10)]
    assert {len(c.tokens) for c in engine.generate(longest, sampling(longest))} == {10}


def test_the_next_request_is_taken_as_soon_as_there_is_room(engine):
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), 20))
    served, taken = [], []

    def feed():
        for number, prompt in enumerate(prompts):
            taken.append((number, len(served)))
            yield Request([prompt], sampling([prompt], samples=2, seed=number, stop=(4, 30, 17, 22)))

    for number, completion in engine.serve(feed()):
        served.append((number, completion.sample))
    assert sorted(served) == [(number, k) for number in range(20) for k in range(2)]
    assert [ended for _, ended in taken[:3]] == [0, 0, 0]  # six responses at once
    at_work = [2 * number - ended for number, ended in taken]
    assert max(at_work) <= 5
    assert sum(n >= 4 for n in at_work[3:]) > 10


def test_interrupted_responses_are_continued_as_if_nothing_had_happened(engine, monkeypatch):
    """The position makes a draw, so the same seed continues where it was."""
    request = Request(PROMPTS[:2], sampling(PROMPTS[:2], tokens=LONG))
    whole = by_response(engine.generate(request.prompts, request.sampling))
    begun, stream = threading.Event(), engine._server.stream

    def watched(*arguments):
        for event in stream(*arguments):
            begun.set()
            yield event

    monkeypatch.setattr(engine._server, "stream", watched)
    partial = by_response(c for _, c in engine.serve(iter([request, request]), begun.is_set))
    assert sorted(partial) == sorted(whole)
    assert {c.finish_reason for c in partial.values()} == {"interrupted"}
    prefixes = tuple(tuple(partial[i, k].tokens.tolist()) for i in range(2) for k in range(3))
    assert any(prefixes)
    rest = by_response(engine.generate(PROMPTS[:2], sampling(PROMPTS[:2], tokens=LONG, prefixes=prefixes)))
    for (i, k), c in rest.items():
        assert [*partial[i, k].tokens, *c.tokens] == whole[i, k].tokens.tolist()
        logprobs = np.concatenate([partial[i, k].logprobs, c.logprobs])
        np.testing.assert_allclose(logprobs, whole[i, k].logprobs, rtol=0, atol=TOLERANCE)
        if engine.settings.routed_experts:
            np.testing.assert_array_equal(np.sort(c.routed_experts), np.sort(whole[i, k].routed_experts))


def test_a_stuck_response_is_cut_off(engine, model):
    cut = list(engine.generate(PROMPTS[:1], sampling(PROMPTS[:1], tokens=LONG, timeout=1e-9)))
    assert {c.finish_reason for c in cut} == {"timeout"}
    for c in cut:  # the clock starts with the first token
        assert 1 <= len(c.tokens) < LONG
        expected = hugging_face(model[0], PROMPTS[0], c.tokens, 1.0)
        np.testing.assert_allclose(c.logprobs, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_stage_is_trained_with_the_experts_that_the_engine_recorded(engine, model, tiny_model, tmp_path, monkeypatch):
    """Both phases, on the server that runs already. Before the first update the actor's routers choose the same."""
    tables = {
        "model": {"path": str(model[0]), "tokenizer": str(tiny_model)},
        "reward": {"kind": "reasoning_gym", "correct_above": 0.02, "require_stop": False},
        "rollout": {"max_response_tokens": 24, "responses_per_prompt": 6},
        "schedule": {"stages": 1, "updates_per_stage": 3, "prompts_per_update": 4},
        "optimizer": {"lr": 1e-2, "warmup_updates": 1},
        "actor": {"routing_replay": "engine"},
        "run": {"tensorboard": False},
    }
    run = RunDir.create(tmp_path / "run", recipe(**tables))

    def running_engine(recipe, stage, policy_dir, version, routed_experts):
        assert (stage, routed_experts) == (0, True)
        engine.load_weights(policy_dir, version)
        return engine

    monkeypatch.setattr("megarl.phases.rollout_worker.build_engine", running_engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    become_single_process()
    copy_policy(model[0], tiny_model, run.stage(0).policy)
    rollout(run, 0)
    for group in RolloutStore(run.stage(0).rollouts).read(range(12)):
        for response in group.responses:
            shape = (len(group.prompt_tokens) + len(response.tokens) - 1, 2, 2)
            assert (response.routed_experts.shape, response.routed_experts.dtype) == (shape, np.int8)
            assert response.routed_experts.min() >= 0
    command = [sys.executable, "-m", "megarl.cli", "optimize", str(run.root), "--stage", "0"]
    optimized = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert optimized.returncode == 0, optimized.stderr
    first, *later = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert first["routing/disagreement"] == 0
    assert 0 < first["m2/all"] < TOLERANCE**2  # the log-ratio is the difference of two implementations
    assert [update["staleness"] for update in later] == [1, 2]
    assert later[0]["grad_norm"] > 0 and 0 < later[1]["routing/disagreement"] < 0.5


def test_a_caller_that_leaves_leaves_nothing_behind(engine):
    def feed():
        yield Request(PROMPTS[:1], sampling(PROMPTS[:1], samples=1, tokens=1))
        yield Request(PROMPTS, sampling(PROMPTS, tokens=LONG, samples=20))

    responses = engine.serve(feed())
    next(responses)
    responses.close()
    for thread in threading.enumerate():
        if "_stream" in thread.name:
            thread.join(3)  # for twenty times six responses after one another the server takes longer
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [2, 39, 3]], r"prompt 1 has token 39, outside .* \[0, 39\)"),
        ([[1], [2, -1]], "prompt 1 has token -1"),
        ([[1] * 110, [1] * 111], "prompt 1 has 111 tokens; with 10 response tokens .* 120 positions"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_serves_on(engine, prompts, message):
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, sampling(prompts))
    good, bad = Request([[8]], sampling([[8]])), Request(prompts, sampling(prompts))
    with pytest.raises(UserError, match=message):
        list(engine.serve(iter([good, bad])))
    assert len(list(engine.generate([[8]], sampling([[8]])))) == 3


def test_what_the_server_refuses_is_an_error_at_once(engine, monkeypatch):
    prompts = [[1] * 200]  # more than its context
    with monkeypatch.context() as unchecked:
        unchecked.setattr(engine, "_check", lambda request: None)
        responses = engine.serve(iter([Request(prompts, sampling(prompts))]))
        with pytest.raises(ServerFailed, match="SGLang refused /generate"):
            next(responses)
    assert len(list(engine.generate([[8]], sampling([[8]])))) == 3


def test_weights_are_those_of_the_last_load(engine, model, tmp_path):
    first, second = (hugging_face_reference(path) for path in model)
    assert check_weights(engine, first).max < TOLERANCE
    with pytest.raises(UserError, match="weights are not the policy's.* nats off"):
        check_weights(engine, second)
    engine.load_weights(model[1], 7)
    assert check_weights(engine, second).max < TOLERANCE
    (c,) = engine.generate([[8]], sampling([[8]], samples=1))
    assert c.policy_version == 7
    np.testing.assert_allclose(c.logprobs, hugging_face(model[1], [8], c.tokens, 1.0), rtol=0, atol=TOLERANCE)
    (tmp_path / "config.json").write_text((model[0] / "config.json").read_text())
    with pytest.raises(UserError, match=f"SGLang cannot load the policy in {tmp_path}"):
        engine.load_weights(tmp_path, 8)
    engine.sleep()
    with pytest.raises(RuntimeError, match="call wake"):
        engine.generate([[8]], sampling([[8]]))
    engine.wake()
    assert check_weights(engine, second).max < TOLERANCE


def test_a_killed_scheduler_is_an_error_with_the_end_of_the_log(engine):
    below = psutil.Process().children(recursive=True)
    servers = {process for process in below if any("sglang" in part or "guard" in part for part in process.cmdline())}
    (scheduler,) = [process for process in servers if process.cmdline()[0].startswith("sglang::scheduler")]
    scheduler.kill()
    with pytest.raises(ServerFailed, match="the SGLang server .* the last lines of its log:\n(?s:.)*scheduler"):
        list(engine.generate(PROMPTS, sampling(PROMPTS, tokens=LONG)))
    assert not any(process.is_running() for process in servers)
