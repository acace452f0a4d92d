"""docs/moving.md: every key and command in it is there, its TOML is of recipes, and what it shows runs."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megarl.cli import main
from megarl.commands.stages.ingest import ingest
from megarl.data.prompts import open_prompts
from megarl.errors import UserError
from megarl.objectives import OBJECTIVES
from megarl.recipe.load import apply_overrides, load_recipe, parse_recipe
from megarl.recipe.tables import Recipe
from megarl.rewards.parts import build_verifier, check_reward, total
from megarl.rollout.drift import hugging_face_reference
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.helpers import RECIPE, ROOT

PAGE = (ROOT / "docs/moving.md").read_text()
OURS = ("", "megarl", "what differs", "as a stage")  # "" is text; the other columns of tables name settings of theirs
CODE = re.compile(r"`([^`]+)`")
KEY = re.compile(r"(?:\[+([\w.]+)\]+(?: (\w+))?|([a-z_]+(?:\.[a-z_]+)*)\.([a-z_]+))(?: = (.+))?")
FILES = (".md", ".py", ".pt", ".toml", ".jsonl", ".jinja")
GROUPS, SIZE = 4, 4  # of the stage that the page makes


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def cells() -> Iterator[tuple[str, str]]:
    """(column, text) of every cell of the page's tables, and ("", text) of every line outside tables and blocks."""
    columns: list[str] = []
    for line in re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        columns = (columns or row) if row else []
        yield from zip(columns, row, strict=True) if row else [("", line)]


THEIRS = {name for column, text in cells() if column not in OURS for name in CODE.findall(text)}
SPANS = sorted({name for column, text in cells() if column in OURS for name in CODE.findall(text)})
SHELL = [line.partition(" #")[0] for line in blocks("sh")[0].replace("\\\n", "").splitlines()]
COMMANDS = [text for text in SPANS + SHELL if text.startswith("megarl ")]


def tiny() -> dict[str, Any]:
    return tomllib.loads(RECIPE.format(model="model", prompts="prompts.jsonl"))


def said(table: str, key: str | None, value: Any, objective: str) -> str:
    """What is wrong with a recipe that has this table with this key and value."""
    tables = tiny() | {"objective": {"name": objective}}
    try:
        apply_overrides(tables, [(f"{table}.{key}", value) if key else (table, {})])
        parse_recipe(tables)
    except UserError as error:
        return str(error)
    return ""


def problem(span: str) -> str | None:
    match = KEY.fullmatch(span)
    if not match or span.endswith(FILES) or span in THEIRS:
        return None
    table, key = match[1] or match[3], match[2] or match[4]
    if not match[1] and table.partition(".")[0] not in Recipe.model_fields:  # another key of a table of theirs
        return None if any(name.startswith(f"{table.partition('.')[0]}.") for name in THEIRS) else f"{span}: whose?"
    # a key without a value gets one that hardly any key can have; what other keys a value needs does not matter
    wrong = re.compile("unknown|has no field" + ("|Input should|expected" if match[5] else ""))
    value = tomllib.loads(f"x = {match[5] or 'nan'}")["x"]
    complaints = [said(table, key, value, name) for name in OBJECTIVES]
    return f"{span}: {complaints[0]}" if all(map(wrong.search, complaints)) else None


def test_every_key_is_one_of_recipes() -> None:
    assert [found for span in SPANS if (found := problem(span))] == []
    assert sum(bool(KEY.fullmatch(span)) for span in SPANS) > 60
    wrong = ("schedule.gone", "[objective.gone] maximum", "[rollout] gone", 'data.overlong = "left"', "objective.gone")
    assert [span for span in wrong if problem(span) is None] == []


def test_every_command_is_there() -> None:
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        with contextlib.redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit) as end:
            main([*words[: 1 + (words[0] == "stage")], "--help"])
        assert end.value.code == 0, command
        assert [word for word in words if word.startswith("--") and word not in told.getvalue()] == [], command


def test_the_toml_is_of_recipes() -> None:
    base = tiny()
    schedule, adaptor = (tomllib.loads(block) for block in blocks("toml"))
    assert parse_recipe(base | schedule).schedule.lag_rule.max_lag == 15  # U - 1
    assert parse_recipe(base | adaptor).reward.path == f"{ROOT}/adaptor.py:score"


def samples_of(model):
    """What slime saves of a rollout: the fields of its samples, here with the log-probs that the model gives."""
    rng, samples = np.random.default_rng(0), []
    for index in range(GROUPS * SIZE):
        group = index // SIZE
        n, prompt = int(rng.integers(2, 7)), np.random.default_rng(group).integers(3, 16, 4).tolist()
        sample = {"group_index": group, "index": index, "rollout_id": None, "response_length": n, "prompt": "abcd="}
        sample |= {"tokens": prompt + rng.integers(3, 16, n).tolist(), "loss_mask": [1] * n, "remove_sample": False}
        sample |= {"response": "abc", "label": "a", "reward": float(rng.integers(2)), "weight_versions": ["0"]}
        samples.append(sample | {"status": "truncated" if n == 6 else "completed", "metadata": {}, "spec_info": {}})
    scores = hugging_face_reference(model, [sample["tokens"] for sample in samples], 1.0).logprobs
    for sample, own in zip(samples, scores, strict=True):
        sample["rollout_log_probs"] = own[-sample["response_length"] :].tolist()
    return samples


def test_slimes_rollouts_become_a_stage(recipe, guessing_model, tmp_path, monkeypatch):
    samples = samples_of(guessing_model)
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    (tmp_path / "to_rows.py").write_text(blocks("python")[0])
    python, ingested, audited, _ = SHELL  # tests/commands/stages/test_ingest.py optimizes such a stage
    assert python == "python to_rows.py 0.pt > rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["to_rows.py", str(tmp_path / "0.pt")])
    with open(tmp_path / "rows.jsonl", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(tmp_path / "to_rows.py"))
    places = {"recipe.toml": recipe, "rows.jsonl": tmp_path / "rows.jsonl", "runs/theirs": tmp_path / "theirs"}
    for command in (ingested, audited):
        main([str(places.get(word, word)) for word in shlex.split(command)[1:]])
    run = RunDir.open(tmp_path / "theirs")
    store = RolloutStore(run.stage(0).rollouts)
    responses = [response for group in store.read(store.group_ids) for response in group.responses]
    for sample, response in zip(samples, responses, strict=True):
        assert response.tokens.tolist() == sample["tokens"][4:] and response.reward == sample["reward"]
        assert response.finish_reason == {"truncated": "length", "completed": "stop"}[sample["status"]]
        np.testing.assert_array_equal(response.rollout_logprobs, np.float32(sample["rollout_log_probs"]))
    assert run.recipe.schedule.updates_per_stage == GROUPS / 2


def test_verls_texts_are_refused(recipe, tmp_path):
    (tmp_path / "1.jsonl").write_text('{"input": "abc=", "output": "a", "gts": "a", "score": 1.0, "step": 1}\n')
    (message,) = re.findall(r'`megarl stage ingest` says "(.*)"', PAGE)
    with pytest.raises(UserError, match=message):
        ingest(recipe, (), [tmp_path / "1.jsonl"], tmp_path / "run", ())


@pytest.mark.parametrize("form", ["{'score': value, 'acc': value > 0}", "value"])
def test_verls_reward_function_scores(form, guessing_model, tmp_path, monkeypatch):
    """The page's adaptor, on a file in verl's form, with a reward of -1 and 1."""
    rewards = f"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "letters" and extra_info == {{"index": 7}}
    value = 1.0 if solution_str == ground_truth else -1.0
    return {form}
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_reward", raising=False)
    (tmp_path / "their_reward.py").write_text(rewards)
    (tmp_path / "adaptor.py").write_text(blocks("python")[1])
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}=")  # the tiny model has no template
    (tmp_path / "recipe.toml").write_text(
        blocks("toml")[1] + f"max_prompt_tokens = 8\n[model]\npath = '{guessing_model}'\n[eval]\nevery = 0\n"
    )
    row = {"data_source": "letters", "prompt": [{"role": "user", "content": "abc"}], "ability": "spelling"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "a"}, "extra_info": {"index": 7}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    recipe = load_recipe(tmp_path / "recipe.toml", ["data.template='chat.jinja'", "actor.backend=cpu"])
    check_reward(recipe)
    prompts = open_prompts(recipe, recipe.model.path)[1]
    verifier = build_verifier(recipe, prompts)
    for response, expected in (("a", (1.0, 1.0)), ("b", (-1.0, 0.0))):
        assert total(verifier.score(prompts.train(0), response), 1, recipe.reward, 6) == expected
