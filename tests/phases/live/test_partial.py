"""Responses that are interrupted by a new policy continue under it, each span with the log-probs of its own policy."""

import contextlib
import functools
import os
import threading
import time

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from megarl.heartbeats import read_beat
from megarl.rollout.builtin import DRAWS, BuiltinEngine
from tests.phases.live.conftest import histogram, metrics
from tests.phases.live.test_live import groups
from tests.rollout.engines import PROMPTS, generate, sampling
from tests.rollout.tiny_models import save


@functools.cache
def load(policy):
    return AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager")


@torch.inference_mode()
def logprobs_under(policy, group, response, temperature=1.0):
    """[n] float32: log-probs of a response's tokens under a policy, at the temperature at which they were sampled."""
    tokens = torch.tensor([[*group.prompt_tokens.tolist(), *response.tokens.tolist()]])
    rows = load(policy)(input_ids=tokens, use_cache=False).logits[0, -len(response.tokens) - 1 : -1].float()
    return (rows / temperature).log_softmax(-1).gather(1, tokens[0, -len(response.tokens) :, None])[:, 0].numpy()


def test_a_continuation_in_another_block_of_random_numbers_changes_nothing(tmp_path):
    engine, length = BuiltinEngine(save(tmp_path / "policy"), 0), DRAWS + 20
    whole = generate(engine, PROMPTS, sampling(PROMPTS, 1, length))
    begun = generate(engine, PROMPTS, sampling(PROMPTS, 1, length, budget=DRAWS + 9))
    prefixes = tuple(tuple(begun[key].tokens.tolist()) for key in sorted(begun))
    assert {len(prefix) for prefix in prefixes} == {DRAWS + 9}
    for key, rest in generate(engine, PROMPTS, sampling(PROMPTS, 1, length, prefixes=prefixes)).items():
        assert [*begun[key].tokens, *rest.tokens] == whole[key].tokens.tolist()
        both = np.concatenate([begun[key].logprobs, rest.logprobs])
        np.testing.assert_allclose(both, whole[key].logprobs, rtol=0, atol=1e-5)


def slow_down(beats, engine, done):
    """Suspend the engine for most of the time while it decodes, so that the trainer is faster."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while not done.is_set():
            beat = read_beat(beats)
            if beat and beat.kind == "decoding":
                engine.suspend()
                time.sleep(0.012)
                engine.resume()
            time.sleep(0.002)


def test_spans_in_a_live_run_have_the_log_probs_of_their_own_policies(phases, new_run, tiny_model, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(prompt, response, row):\n    return float(len(response) % 2)\n")
    run = new_run(
        "run", kind="live", stages=1, updates_per_stage=6, sync_every=1, max_lag=4, partial=True, prompts_per_update=2,
        rollout__max_response_tokens=64, rollout__groups_per_chunk=2, actor__checkpoint_every=6,
        model__path=str(tiny_model), reward__kind="python", reward__path=f"{rewards}:score", reward__require_stop=False,
        optimizer__lr=1e-2,
    )  # fmt: skip
    kept = run.root / "kept"
    done = threading.Event()

    def keep_policies():  # as hard links, because the run removes versions that it no longer needs
        while not done.is_set():
            for path in [*run.root.glob("stages/000/policies/[0-9]*"), run.stage(0).policy]:
                target = kept / (path.name if path.name != "policy" else "000000")
                if not target.exists():
                    target.mkdir(parents=True)
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        for name in ("config.json", "model.safetensors"):
                            os.link(path / name, target / name)
            time.sleep(0.001)

    pids = phases.start(run, "live")
    threads = [
        threading.Thread(target=keep_policies),
        threading.Thread(target=slow_down, args=(phases.logs / "rank_0001.beats", psutil.Process(pids[1]), done)),
    ]
    for thread in threads:
        thread.start()
    try:
        assert phases.wait() == [0, 0]
    finally:
        done.set()
        for thread in threads:
            thread.join()
    updates = metrics(run)
    assert max(histogram(updates)) <= 4
    compared = 0  # the largest number of versions compared within one response
    for number, group in enumerate(groups(run)):
        for response in group.responses:
            versions = response.versions
            assert (np.diff(versions) >= 0).all()
            assert 0 <= number // 2 - versions[0] <= 4
            if response.policy_versions is None:
                continue
            here = 0
            for version in np.unique(versions):
                mine, policy = versions == version, kept / f"{version:06d}"
                if (policy / "model.safetensors").exists():
                    expected = logprobs_under(policy, group, response)
                    np.testing.assert_allclose(response.rollout_logprobs[mine], expected[mine], rtol=0, atol=1e-4)
                    here += 1
            compared = max(compared, here)
    assert compared >= 2  # else nothing was interrupted
    mixed = [update for update in updates if update["staleness/min"] < update["staleness/max"]]
    assert mixed
