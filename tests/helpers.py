"""What tests of several folders share: the repository's root, the command line, a tiny recipe, reading a run."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SGLANG_PYTHON = ROOT / "tests/sglang/python"  # the interpreter of .venv-sglang

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


def megarl(*arguments, timeout=900, **options):
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options)


def write_recipe(directory, model, words):
    """The tiny recipe with a prompt file: a word should be answered with its first letter."""
    path, prompts = directory / "recipe.toml", directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": word[0]}) + "\n" for word in words))
    path.write_text(RECIPE.format(model=model, prompts=prompts))
    return path


def metrics(run):
    return read_lines(run.metrics)


def events(run, kind):
    return [event for event in read_lines(run.events) if event["event"] == kind]


def read_lines(path):
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
