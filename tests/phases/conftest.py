"""A tiny run: a random Qwen3-MoE that should answer with the first letter of a word, seconds a phase."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RECIPE = """
[model]
path = "{model}"
[data]
source = "file"
train = "{prompts}"
prompt_template = "{{prompt}}="
max_prompt_tokens = 8
[reward]
kind = "exact"
[rollout]
max_response_tokens = 6
responses_per_prompt = 4
groups_per_chunk = 8
[schedule]
stages = 2
updates_per_stage = 6
prompts_per_update = 4
[objective]
name = "mu_grpo"
[optimizer]
lr = 1e-3
[actor]
backend = "cpu"
checkpoint_every = 2
[eval]
prompts = 16
[run]
tensorboard = false
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The quickstart's untrained model and tokenizer."""
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    try:
        from make_base import write_initial_model
    finally:
        sys.path.pop(0)
    path = tmp_path_factory.mktemp("model") / "model"
    write_initial_model(path)
    return path


@pytest.fixture(scope="module")
def recipe(tiny_model, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("recipe")
    path, prompts = tmp_path / "recipe.toml", tmp_path / "prompts.jsonl"
    words = ["".join(letters) for letters in itertools.product("abcde", repeat=3)]
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": word[0]}) + "\n" for word in words))
    path.write_text(RECIPE.format(model=tiny_model, prompts=prompts))
    return path


def megarl(*arguments, timeout=900, **options):
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options)
