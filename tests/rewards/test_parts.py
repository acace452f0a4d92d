"""Rewards beyond right and wrong: a user's own function, partial credit, and the parts of a reward."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megarl.errors import UserError
from megarl.phases.scoring import Scoring, text_of
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score
from megarl.rewards.parts import build_verifier, check_reward, overlong, total, totals
from megarl.rewards.pool import Limits
from megarl.storage.metrics.summary import summary
from megarl.storage.rollouts import Group, Response
from tests.data import prompt_sources
from tests.data.prompt_sources import write
from tests.rewards import pooling

SOURCE = """
def score(prompt, response, row):
    if response == "share":
        return 0.5
    if response == "dict":
        return {"score": 1, "reward": -2.5}
    if response == "spin":
        while True: pass
    return float(response == row["answer"] and row["level"] == 3 and prompt == "?")
"""


def test_thoughts_in_a_channel_of_gpt_oss_are_not_scored():
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    words = {word: number for number, word in enumerate([*marks, "assistant", "analysis", "final", "41", "42"])}
    inner = Tokenizer(models.WordLevel(words, "41"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=marks)
    written = (
        "<|channel|> analysis <|message|> 41 <|end|> <|start|> assistant <|channel|> final <|message|> 42 <|return|>"
    )
    tokens = np.array([words[word] for word in written.split()])
    assert text_of(tokenizer)(tokens) == "42" and text_of(tokenizer)(tokens[:4]) == "analysis41"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(SOURCE)
    return path


def recipe(tmp_path, model="unused", **reward):
    file = write(tmp_path / "p.jsonl", [{"prompt": "?", "answer": "42", "level": 3}])
    return prompt_sources.recipe(file=file, reward=reward, model=model)


def scored(settings, texts, tokens=1, finish="stop", seconds=0.5):
    """Score responses with these texts; returns them as they are stored. seconds: of the CPU, for each."""
    with pooling.pool(lambda: build_verifier(settings, None), Limits(seconds=seconds, workers=1)) as pool:
        scoring = Scoring(pool, settings.reward, lambda ids: texts[ids[0]], False, longest=10)
        logprobs, prompt = np.zeros(tokens, np.float32), pooling.prompt_for("42", level=3)
        given = [Response(np.full(tokens, n, np.int32), logprobs, 0.0, finish, 0) for n in range(len(texts))]
        (whole,) = scoring.again([Group(0, np.ones(1, np.int32), tuple(given))], lambda group: prompt)
    return whole.responses


def test_a_users_own_function_gives_rewards_and_correctness(tmp_path, file, tiny_model):
    settings = recipe(tmp_path, tiny_model, kind="python", path=f"{file}:score")
    check_reward(settings)
    responses = scored(settings, ["42", "43", "share", "dict", "spin", "42"])
    assert [r.reward for r in responses] == [1, 0, 0, -2.5, 0, 1], "an endless loop costs only its own reward"
    assert [r.correctness for r in responses] == [1, 0, 0, 1, 0, 1]
    found = summary([Group(0, np.ones(1, np.int32), tuple(responses))])
    assert (found["correct/mean"], found["reward/mean"]) == pytest.approx((1 / 2, -1 / 12))
    credit = recipe(tmp_path, kind="python", path=f"{file}:score", partial_credit=True)
    assert [(r.reward, r.correctness) for r in scored(credit, ["share", "dict"])] == [(0.5, 0), (-2.5, 1)]


def test_a_function_of_a_part_is_tried_before_the_run(tmp_path, file):
    file.write_text("def score(")
    part = {"kind": "python", "weight": 1.0, "path": f"{file}:score"}
    with pytest.raises(UserError, match="cannot be loaded: SyntaxError"):
        check_reward(recipe(tmp_path, kind="exact", parts=[part]))


def test_the_reward_is_the_sum_of_its_parts(tmp_path, file):
    """A box is worth 0.1, as in M2PO. A response that was cut off gets nothing but the penalty for its length."""
    parts = [
        {"kind": "box", "weight": 0.1},
        {"kind": "python", "weight": -2.0, "path": f"{file}:score"},
        {"kind": "overlong", "weight": 1.0, "buffer": 4},
    ]
    settings = recipe(tmp_path, kind="math", parts=parts)
    texts = ["\\boxed{42}", "\\boxed{41}", "42", "share", "<think>\\boxed{42}</think>no"]
    responses = scored(settings, texts, tokens=6, seconds=30)  # the first formula also pays for imports
    assert [r.reward for r in responses] == pytest.approx([1.1, 0.1, 1 - 2, -1, 0])
    assert [r.correctness for r in responses] == [1, 0, 1, 0, 0]
    assert [r.reward for r in scored(settings, texts, tokens=10, finish="length", seconds=30)] == [-1] * 5


def test_the_overlong_penalty_is_that_of_dapo():
    assert [overlong(tokens, 20, 4) for tokens in (1, 16, 17, 18, 20, 25)] == [0, 0, -0.25, -0.5, -1, -1]
    parts = ({"kind": "overlong", "weight": 2.0, "buffer": 4},)
    table = RewardTable.model_validate({"kind": "exact", "parts": parts})
    assert total(Score(1.0), 18, table, 20) == (0.0, 1.0)
    assert total(Score(1.0), 1, table.model_copy(update={"weight": 0.9}), 20) == (0.9, 1.0)


def test_a_group_is_scored_together(tmp_path, file, tiny_model):
    """The limits hold for the group as a whole, and a list of another length is a mistake."""
    file.write_text(
        """
def score(prompt, responses, row):
    if "spin" in responses:
        while True: pass
    if "few" in responses:
        return [1.0]
    return [{"score": float(text == min(responses)), "reward": float(len(responses))} for text in responses]
"""
    )
    settings = recipe(tmp_path, tiny_model, kind="python", path=f"{file}:score", group=True)
    check_reward(settings)
    assert [(r.reward, r.correctness) for r in scored(settings, ["b", "a", "c"])] == [(3, 0), (3, 1), (3, 0)]
    assert [r.reward for r in scored(settings, ["b", "spin", "c"])] == [0, 0, 0]
    with pytest.raises(UserError, match=r"returned \[1.0\] for 2 responses: expected a list of as many scores"):
        scored(settings, ["few", "a"])


def test_the_length_reward_is_that_of_kimi_k1_5():
    """Section 2.3.3 of arXiv:2501.12599: .5 - (length - least) / (most - least), and at most 0 for a wrong answer."""
    table = RewardTable(kind="exact", parts=[{"kind": "length", "weight": 0.4}, {"kind": "length", "weight": 0.6}])
    scores = [Score(1.0), Score(1.0), Score(0.0), Score(0.0), Score(1.0)]
    found = totals(scores, [10, 20, 10, 20, 16], table, 100)
    assert [reward for reward, _ in found] == pytest.approx([1.5, 0.5, 0.0, -0.5, 0.9])
    assert [correct for _, correct in found] == [1, 1, 0, 0, 1]
    assert totals(scores[:2], [7, 7], table, 100) == [(1.0, 1.0)] * 2
