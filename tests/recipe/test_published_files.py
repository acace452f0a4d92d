"""The recipe of every row of examples/README.md starts on files of the published schema.

The files have the columns of the data sets and a few rows; a tokenizer of characters stands in for the models' own.
"""

import json
import shutil
import tomllib
import warnings

import pytest

from megarl.data.prompts import build_prompts, check_data
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.parts import check_reward
from tests.data.prompt_sources import char_tokenizer
from tests.data.test_formats import CONTEST, DAPO, FIRST, SECOND, SKYWORK, chat, live_code_bench, write
from tests.helpers import ROOT
from tests.recipe.test_examples import TRAINED, recipe_of

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="


def question(n):
    return f"what is {n} + {n}?"


def sums(prompt, answer="answer", **other):
    """Rows whose first answer is empty and whose second one is no mathematics."""
    golds = ["", "$$", *(str(2 * n) for n in range(2, 12))]
    return [{prompt: question(n), answer: gold, **other} for n, gold in enumerate(golds)]


def chats(row, gold):
    """Rows like ``row`` with other questions."""
    text = row["prompt"][0]["content"]
    return [
        row | {"prompt": chat(text.replace("What is $3^2$?", question(n))), "reward_model": {"ground_truth": gold(n)}}
        for n in range(40)
    ]


FILES = {
    "deepscaler.json": [{"problem": question(n), "answer": str(2 * n), "solution": ""} for n in range(100, 140)],
    "dapo-math-17k.parquet": chats(DAPO, lambda n: str(2 * n)) * 3,  # as published, with repeated rows
    "skywork_or1_math.parquet": chats(SKYWORK, lambda n: json.dumps([str(2 * n), f"{2 * n}.0"])),
    "code_contests.parquet": [CONTEST | {"description": f"add {n}"} for n in range(40)],
    "aime24.parquet": sums("problem", id=1, solution=r"\boxed{}", url="", year="2024"),
    "aime-2024.parquet": chats(DAPO, lambda n: "" if n == 0 else str(2 * n)),
    "aime25.jsonl": sums("problem", id="1", solution="none \\boxed{}"),
    "amc23.parquet": sums("question", id=1, url=""),
    "amc24.parquet": sums("problem"),
    "math500.jsonl": sums("problem", solution=r"\boxed{}", subject="Algebra", level=1, unique_id="x"),
    "minerva.parquet": sums("question"),
    "gaokao.jsonl": sums("question", source="2023BJ", lang="en"),
    "olympiad.parquet": [
        {"id": n, "question": row["question"], "final_answer": [row["answer"]]}
        for n, row in enumerate(sums("question"))
    ],
    "gsm8k.parquet": [{"question": question(n), "answer": f"so\n#### {2 * n}"} for n in range(9)],
    "livecodebench.jsonl": [live_code_bench([FIRST], json.dumps([SECOND]))],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data/ with all files, and a tokenizer of characters with a chat template."""
    path = tmp_path_factory.mktemp("published")
    (path / "data").mkdir()
    for name, rows in FILES.items():
        write(path / "data" / name, rows)
    char_tokenizer(path / "tokenizer", chat_template=TEMPLATE)
    return path


def test_no_row_changes_the_data_of_its_recipe():
    """So that one row of each recipe is enough to test."""
    described = (" data.", " reward.", " eval.suites.", " eval.data.")
    assert not [name for name, command in TRAINED if any(key in command for key in described)]


def read_by(command):
    """What decides how a row's files are read and judged: many recipes have it in common."""
    tables = tomllib.loads((ROOT / command.split()[2]).read_text())
    suites = [suite | {"samples": 1} for suite in tables["eval"].get("suites", [])]
    return repr([tables["data"], tables["reward"], tables["eval"].get("data"), suites])


@pytest.mark.parametrize("command", {read_by(command): command for _, command in TRAINED}.values())
def test_a_row_starts_on_files_of_the_published_schema(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    recipe = recipe_of(command)
    if not recipe.model.path.exists():  # below this folder: the configuration of the model with the tokenizer
        shutil.copytree("tokenizer", recipe.model.path)
        shutil.copy((ROOT / command.split()[2]).with_name("config.json"), recipe.model.path)
    hf = json.loads((recipe.model.path / "config.json").read_text())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_data(recipe, hf)
        check_reward(recipe)
        prompts = build_prompts(recipe, load_tokenizer(recipe.model.tokenizer_path))
    unread = [str(one.message) for one in said if "cannot be read" in str(one.message)]
    readable = {"math": ("gsm8k",), "dapo": ("gsm8k",), "code": ("livecodebench",)}[recipe.reward.kind]
    assert len(unread) == len([suite for suite in recipe.suites if suite.name not in readable])
    assert any("Answer:" in prompts.train(n).text for n in range(3)) == (recipe.reward.kind == "dapo")
    if recipe.reward.kind != "code":
        asked = "Answer:" if recipe.reward.kind == "dapo" else "\\boxed{"
        assert all(asked in prompt.text for prompt in prompts.heldout())
