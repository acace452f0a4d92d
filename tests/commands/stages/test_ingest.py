"""Stages made from responses of other systems; a mistake is reported with its row."""

import re

import numpy as np
import pytest

from megarl.commands.one_phase import branch, changed_recipe
from megarl.commands.stages.ingest import ingest
from megarl.data.prompts import open_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.phases.rescore import rescore
from megarl.recipe.load import load_recipe
from megarl.rollout.drift import hugging_face_reference
from megarl.storage.ledger import sealed_external
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from tests.commands.stages.made_up import SETTINGS, VOCABULARY
from tests.data.prompt_sources import write
from tests.helpers import events, read_lines
from tests.phases.commands import succeed
from tests.storage.sample_rollouts import as_bytes

GROUPS, SIZE = 8, 4  # groups of a stage, responses of a group


@pytest.fixture(scope="module")
def rows(guessing_model):
    """Rows as an agent harness would write them, with the log-probs of their tokens under the policy."""
    rng, rows = np.random.default_rng(0), []
    for number in range(GROUPS):
        prompt = rng.integers(3, VOCABULARY, 4).tolist()
        for _ in range(SIZE):
            tokens = rng.integers(3, VOCABULARY, int(rng.integers(2, 7))).tolist()
            mask = (rng.random(len(tokens)) < 0.6).tolist()
            mask[0] = True
            row = {"group_id": f"task {number}", "prompt_tokens": prompt, "response_tokens": tokens, "loss_mask": mask}
            rows.append(row | {"reward": float(rng.integers(2)), "finish_reason": "stop"})
    sequences = [row["prompt_tokens"] + row["response_tokens"] for row in rows]
    scores = hugging_face_reference(guessing_model, sequences, 1.0).logprobs
    for row, own in zip(rows, scores, strict=True):
        row["rollout_logprobs"] = own[-len(row["response_tokens"]) :].tolist()
    return rows


def ingested(recipe, target, *files, settings=(), ignored=()):
    said = ingest(recipe, [*SETTINGS, *settings], files, target, ignored)
    assert said.endswith(f"\nnext    megarl audit {target}\n        megarl optimize {target} --stage 0")
    return RunDir.open(target)


def stored(run):
    store = RolloutStore(run.stage(0).rollouts)
    return store.read(store.group_ids)


def test_rows_are_stored_exactly(recipe, rows, tmp_path):
    run = ingested(recipe, tmp_path / "run", write(tmp_path / "a.jsonl", rows))
    groups = stored(run)
    for row, (group, response) in zip(rows, ((g, r) for g in groups for r in g.responses), strict=True):
        mask = np.array(row["loss_mask"])
        assert group.prompt_tokens.tolist() == row["prompt_tokens"]
        assert response.tokens.tolist() == row["response_tokens"]
        assert response.sampled.tolist() == row["loss_mask"]
        np.testing.assert_array_equal(response.rollout_logprobs[mask], np.float32(row["rollout_logprobs"])[mask])
        assert not response.rollout_logprobs[~mask].any() and response.reward == row["reward"]
    assert (run.stage(0).is_sealed(), len(groups)) == (True, GROUPS)
    found = audit(run.root, 100)
    assert found.problems == []  # the audit recomputes the log-probs of sampled tokens
    assert found.notes == ["stage 0 was filled from outside: no prompt and no reward was compared"]


def test_rewards_from_outside_can_be_repaired_in_a_branch(recipe, rows, tmp_path, monkeypatch):
    """The function gets the text of a prompt, of the responses, and their rewards."""
    rewarded = [row | {"reward": 900.0, "correct": 1} for row in rows]
    run = ingested(recipe, tmp_path / "run", write(tmp_path / "a.jsonl", rewarded))
    (tmp_path / "repair.py").write_text("""
def score(prompt, responses, row):
    assert prompt == row["prompt"] and len(prompt) >= 4 and row["rewards"] == [900.0] * len(responses)
    return [{"score": float("a" in text), "reward": reward / 1000} for text, reward in zip(responses, row["rewards"])]
""")
    python = ["reward.kind=python", f"reward.path={tmp_path}/repair.py:score", "reward.group=true"]
    with pytest.raises(UserError, match=r"came from outside, with prompts that have no answers.* python, http, judge"):
        changed_recipe(run.stage(0), ["reward.kind=math"])
    stage = branch(run.stage(0), tmp_path / "branch", changed_recipe(run.stage(0), python))
    monkeypatch.setenv("RANK", "0")
    rescore(stage)
    letter = load_tokenizer(stage.policy).convert_tokens_to_ids("a")
    for before, after in zip(stored(run), stored(stage.run), strict=True):
        assert before.prompt_tokens.tolist() == after.prompt_tokens.tolist()
        assert [response.reward for response in after.responses] == [0.9] * SIZE
        expected = [float(letter in response.tokens) for response in before.responses]
        assert [response.correctness for response in after.responses] == expected
    assert sealed_external(stage.rollouts)  # no prompt and no reward is compared by the audit


def test_metrics_count_sampled_tokens_and_lags_of_their_versions(recipe, rows, tmp_path):
    ages = ([(number % 2 - 3) * own for own in row["loss_mask"]] for number, row in enumerate(rows))  # 0: tool output
    aged = [row | {"policy_versions": versions} for row, versions in zip(rows, ages, strict=True)]
    run = ingested(recipe, tmp_path / "run", write(tmp_path / "a.jsonl", aged))
    succeed("optimize", run.root, "--stage", 0)
    for update, line in enumerate(read_lines(run.metrics)):
        batch = list(enumerate(rows))[update * 4 * SIZE : (update + 1) * 4 * SIZE]
        assert line["trained_tokens"] == sum(sum(row["loss_mask"]) for _, row in batch)
        assert line["tokens"] == sum(len(row["response_tokens"]) + 3 for _, row in batch)
        assert line["response_tokens/mean"] == pytest.approx(line["trained_tokens"] / len(batch))
        lags = [update + 3 - number % 2 for number, row in batch for _ in range(sum(row["loss_mask"]))]
        assert (line["staleness"], line["staleness/min"]) == (max(lags), min(lags))
        assert line["staleness/mean"] == pytest.approx(np.mean(lags))
    assert audit(run.root, 0).problems == []


def test_several_files_become_one_stage(recipe, rows, tmp_path):
    whole = ingested(recipe, tmp_path / "whole", write(tmp_path / "a.jsonl", rows))
    traced = [row | {"trace": "x"} for row in rows[18:]]
    parts = [write(tmp_path / "monday.parquet", rows[:18]), write(tmp_path / "tuesday.jsonl", traced)]
    with pytest.raises(UserError, match="trace: unknown key.*; --ignore COLUMN skips it"):
        ingested(recipe, tmp_path / "merged", *parts)
    merged = ingested(recipe, tmp_path / "merged", *parts, ignored=["trace"])
    assert list(map(as_bytes, stored(merged))) == list(map(as_bytes, stored(whole)))
    with pytest.raises(UserError, match=r"monday.parquet, row 1: group 'task 0' has more than"):
        ingested(recipe, tmp_path / "twice", *parts, parts[0], ignored=["trace"])
    with pytest.raises(UserError, match=r"'task 4', which begins in .*monday.parquet, row 17, has 2 responses"):
        ingested(recipe, tmp_path / "half", parts[0])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "\n[1]\n", r"a\.jsonl, row 2 is not an object"),
        ("a.parquet", "no", "is not a valid Parquet file"),
        ("a.csv", "", "expected a file that ends in .jsonl"),
    ],
)
def test_files_without_rows_are_refused(recipe, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        ingested(recipe, tmp_path / "run", tmp_path / name)


# a column, its value or a function from the number of tokens to it, and what is said about it
MISTAKES = {
    "no log-probs": ("rollout_logprobs", None, "rollout_logprobs: required, but not set"),
    "lengths": ("rollout_logprobs", [-1.0], "rollout_logprobs has 1 entries"),
    "unknown token": ("response_tokens", [99999], "response_tokens must have token ids below"),
    "token beyond 32 bits": ("response_tokens", [1 << 40], "response_tokens.0: .*less than 2147483648"),
    "token text": ("prompt_tokens", ["a"], "prompt_tokens.0: .*valid integer .got 'a'"),
    "long response": ("response_tokens", [3] * 7, "more than rollout.max_response_tokens = 6"),
    "mask value": ("loss_mask", lambda n: [2] * n, "loss_mask.0"),
    "reward": ("reward", "high", "reward is 'high', expected a finite number"),
    "unfinished": ("finish_reason", "unfinished", "finish_reason: .*'stop', 'length' or 'timeout'"),
    "correct": ("correct", 0.5, "correct: .*0 or 1"),
    "no correct": ("reward", 1.25, "reward is 1.25: add the column correct, 1 or 0"),
    "version": ("policy_version", 1, "policy_version: .*less than or equal to 0"),
    "decreasing versions": ("policy_versions", lambda n: [0] + [-1] * (n - 1), "never decrease"),
    "weights": ("weights_hash", "abc", "weights_hash is not"),
    "column": ("loss_msk", [1], "loss_msk: unknown key; did you mean 'loss_mask'"),
    "group": ("group_id", 1.5, "group_id.*got 1.5"),
    "other prompt": ("prompt_tokens", [3, 3], "has other prompt_tokens than in .*row 1$"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_row(mistake, recipe, rows, tmp_path):
    name, value, message = MISTAKES[mistake]
    value = value(len(rows[1]["response_tokens"])) if callable(value) else value
    path = write(tmp_path / "a.jsonl", [rows[0], rows[1] | {name: value}, *rows[2:]])
    with pytest.raises(UserError, match=message) as refused:
        ingested(recipe, tmp_path / "run", path)
    assert re.search(r"a\.jsonl, row 2\b", str(refused.value))
    assert not (tmp_path / "run").exists()


def test_a_group_too_many_is_refused(recipe, rows, tmp_path):
    more = [row | {"group_id": "another"} for row in rows[:SIZE]]
    with pytest.raises(UserError, match=r"row 33 begins group 'another', number 9: the recipe needs 8"):
        ingested(recipe, tmp_path / "run", write(tmp_path / "b.jsonl", rows + more))


def test_groups_with_held_out_prompts_are_left_out(recipe, guessing_model, tmp_path):
    settings = ["schedule.updates_per_stage=16", "eval.every=1"]  # 64 groups of 4 responses
    _, prompts = open_prompts(load_recipe(recipe, [*SETTINGS, *settings]), guessing_model)
    heldout = [prompt.tokens for prompt in prompts.heldout()]
    trained = [prompt.tokens for prompt in prompts.first_epoch(64)]
    assert (len(heldout), len(trained)) == (16, 64)
    made = {"response_tokens": [3], "rollout_logprobs": [-1.0], "reward": 1}
    mixed = [*trained[:10], *heldout[:3], *trained[10:57], *heldout[3:7], *trained[57:]]
    groups = [made | {"group_id": f"task {n}", "prompt_tokens": list(group)} for n, group in enumerate(mixed)]
    short = write(tmp_path / "short.jsonl", [row for row in groups[:64] for _ in range(SIZE)])
    with pytest.raises(UserError, match=r"there are 57 groups .7 more are held out for evaluation.: the recipe needs"):
        ingested(recipe, tmp_path / "short", short, settings=settings)
    more = write(tmp_path / "more.jsonl", [row for row in groups for _ in range(SIZE)])
    run = ingested(recipe, tmp_path / "run", more, settings=settings)
    assert [tuple(group.prompt_tokens.tolist()) for group in stored(run)] == trained
    assert [event["left_out"] for event in events(run, "ingested")] == [7]
    unevaluated = ingested(recipe, tmp_path / "off", short, settings=settings[:1])  # nothing is held out
    assert len(stored(unevaluated)) == 64
