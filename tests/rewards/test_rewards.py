"""Scores of the verifiers, the threshold of a right response, and hostile responses, which achieve nothing."""

import importlib
import json

import pytest

from megarl.errors import UserError
from megarl.recipe.names import VERIFIERS
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score, exact, is_scored
from megarl.rewards.math import Math
from megarl.rewards.parts import check_reward, total
from tests.data.prompt_sources import recipe
from tests.rewards.pooling import generated, prompt_for

GARBAGE = ("", " ", "x", "[1,2", "(" * 300, '{"a": 1}', "null", "[]", "[[1]]", "1e999", "nan", "\x00", "\ud800")
GARBAGE += ("9" * 5000, "\\boxed{", "," * 3000, "\\boxed{__import__('pathlib').Path('TRACE').write_text('x')}")


@pytest.mark.parametrize(
    ("score", "finish_reason", "table", "expected"),
    [
        (1.0, "stop", {}, 1.0),
        (0.95, "stop", {}, 0.0),
        (0.5, "stop", {"correct_above": 0.5}, 1.0),
        (1.0, "length", {}, 0.0),
        (1.0, "length", {"require_stop": False}, 1.0),
    ],
)
def test_the_reward_depends_on_the_threshold_and_the_finish_reason(score, finish_reason, table, expected):
    settings = RewardTable(kind="exact", **table)
    assert is_scored(finish_reason, settings) * total(Score(score), 1, settings, 1)[0] == expected


def test_exact_compares_all_but_outer_white_space():
    compared = exact.build(RewardTable(kind="exact"), None)
    assert compared.score(prompt_for("ab c"), " ab c\n") == 1.0
    assert compared.score(prompt_for("abc"), "Abc") == 0.0
    assert compared.score(prompt_for("abc"), "abc abc") == 0.0
    with pytest.raises(UserError, match="has no answer to compare with"):
        compared.score(prompt_for(""), "")


@pytest.mark.parametrize("kind", ["exact", "math", "dapo", "prime_math", "qwen_math"])
def test_garbage_is_wrong_and_nothing_is_evaluated(kind, tmp_path):
    verifier = importlib.import_module(VERIFIERS[kind]).build(RewardTable(kind=kind), None)
    texts = [text.replace("TRACE", str(tmp_path / "trace")) for text in (*GARBAGE, "41")]
    assert [text for text in texts if verifier.score(prompt_for("42"), text)] == []
    assert not (tmp_path / "trace").exists()


def test_garbage_is_wrong_also_for_scorers_that_raise_on_it():
    prompts, verifier = generated(["prime_factorization", "countdown"])
    assert max(verifier.score(prompt, text) for (prompt,) in prompts.values() for text in GARBAGE) < 0.999


def test_with_boxed_only_an_answer_in_a_box_counts():
    boxed = Math(RewardTable(kind="math", boxed=True))
    assert [boxed.score(prompt_for("42"), text) for text in ("42", "$42$", "\\boxed{42}", "\\boxed{42")] == [0, 0, 1, 0]


def test_reference_answers_that_cannot_be_parsed_are_found_before_the_run(tmp_path):
    file = tmp_path / "p.jsonl"
    answers = ["1", "$$", "\\$18.90", "\\boxed{}", "x^2"]
    file.write_text("\n".join(json.dumps({"prompt": "?", "answer": answer}) for answer in answers))
    with pytest.raises(UserError, match=r"p.jsonl, line 2: the answer '..' .*\n.*p.jsonl, line 4: ") as error:
        check_reward(recipe(file=file, kind="math"))
    assert "line 3" not in str(error.value) and "line 5" not in str(error.value)


def test_answers_of_a_suite_that_cannot_be_read_are_warned_of(tmp_path):
    """Gaokao as M2PO's authors publish it has two empty ones."""
    train, exam = tmp_path / "p.jsonl", tmp_path / "exam.jsonl"
    train.write_text('{"prompt": "?", "answer": "1"}\n{"prompt": "??", "answer": "2"}')
    answers = ["1", "", None, "$$", "x^2"]
    exam.write_text("\n".join(json.dumps({"prompt": "?", "answer": answer}) for answer in answers))
    for kind, unread in (("math", 3), ("exact", 2)):
        found = recipe(file=train, kind=kind, evaluation={"suite": str(exam), "source": "file"})
        with pytest.warns(UserWarning, match=f"exam.jsonl: {unread} of its 5 answers cannot be read.*line 2"):
            check_reward(found)
    exam.write_text('{"prompt": "?", "answer": [1]}')  # not an answer at all
    with pytest.raises(UserError, match="answer must be"):
        check_reward(found)


def test_only_generators_have_a_reasoning_gym_scorer(tmp_path):
    file = tmp_path / "p.jsonl"
    exam = recipe("chain_sum", heldout=1, evaluation={"source": "file", "suite": str(file)})
    with pytest.raises(UserError, match='cannot score eval.source = "file"'):
        check_reward(exam)
    with pytest.raises(UserError, match='reward.kind = "reasoning_gym" needs data.source = "reasoning_gym"'):
        check_reward(recipe(file=file, kind="reasoning_gym"))
    check_reward(recipe("chain_sum", evaluation={"source": "file", "suite": str(file), "every": 0}))
    file.write_text('{"prompt": "?", "answer": "1"}')
    for kind in ("exact", "math"):
        check_reward(recipe(file=file, kind=kind))
