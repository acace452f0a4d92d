"""Scores of the verifiers, the threshold of a right response, and hostile responses, which achieve nothing."""

import tracemalloc

import pytest

from megarl.data.boxes import joined_boxes, last_box
from megarl.errors import UserError
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score, is_scored
from megarl.rewards.answers import answer_of
from megarl.rewards.math import Math
from megarl.rewards.parts import check_reward, total
from tests.data.prompt_sources import recipe, write
from tests.rewards.pooling import prompt_for, rows_of, scorer

GARBAGE = ("", " ", "x", "[1,2", "(" * 300, '{"a": 1}', "null", "[]", "[[1]]", "1e999", "nan", "\x00", "\ud800")
GARBAGE += ("9" * 5000, "\\boxed{", "," * 3000, "\\boxed{__import__('pathlib').Path('TRACE').write_text('x')}")
PAIRS = rows_of("judged_pairs.jsonl")
MATH, BOXED_ONLY = (Math(RewardTable(kind="math", boxed=boxed)) for boxed in (False, True))


def test_the_reward_depends_on_the_threshold_and_the_finish_reason():
    def reward(score, finish_reason="stop", **table):
        settings = RewardTable(kind="exact", **table)
        return is_scored(finish_reason, settings) * total(Score(score), 1, settings, 1)[0]

    assert (reward(1.0), reward(0.95), reward(0.5, correct_above=0.5)) == (1, 0, 1)
    assert (reward(1.0, "length"), reward(1.0, "length", require_stop=False)) == (0, 1)


def test_exact_compares_all_but_outer_white_space():
    compared = scorer("exact")
    assert compared.score(prompt_for("ab c"), " ab c\n") == 1.0
    assert compared.score(prompt_for("abc"), "Abc") == compared.score(prompt_for("abc"), "abc abc") == 0.0


@pytest.mark.parametrize("kind", ["exact", "math", "dapo", "prime_math", "qwen_math"])
def test_garbage_is_wrong_and_nothing_is_evaluated(kind, tmp_path):
    verifier, texts = scorer(kind), [text.replace("TRACE", str(tmp_path / "trace")) for text in (*GARBAGE, "41")]
    assert [text for text in texts if verifier.score(prompt_for("42"), text)] == []
    assert not (tmp_path / "trace").exists()


def test_the_verdicts_are_those_of_a_person():
    """judged_pairs.jsonl."""
    wrong = [one for one in PAIRS if MATH.score(prompt_for(one["gold"]), one["response"]) != float(one["right"])]
    assert len(PAIRS) >= 300 and wrong == []


ANSWERS = ("-3", "42", "\\frac{7}{2}", "0.25", "x^2+1", "3\\sqrt{2}", "(1,2)", "[0,1)", "\\{1,2\\}", "2\\pi", "4.5e33")
BOXED = ("\\boxed{%s}", "\\boxed{%s.}", "\\boxed{\\text{The answer is } %s}", "$\\boxed %s$", " \\boxed{ %s } ")
HARMLESS = ("\\boxed{\\textcolor{red}{%s}}", "\\boxed{\\color{blue}%s}", "<think>\\boxed{no}</think>$\\boxed{%s}$")
HARMLESS += ("The answer is **\\boxed{%s}**.", "<think>so</think>\n<answer>\\boxed{%s}</answer>")


@pytest.mark.parametrize("gold", ANSWERS)
def test_harmless_text_around_an_answer_changes_no_verdict(gold):
    for writing in BOXED:
        response = writing.replace("%s", gold)
        assert BOXED_ONLY.score(prompt_for(gold), response) == 1.0
        assert BOXED_ONLY.score(prompt_for(gold), f"${gold}$") == 0.0
        assert answer_of("math", response) == answer_of("math", f"\\boxed{{{gold}}}")
    for writing in HARMLESS:
        responses = {other: writing.replace("%s", other) for other in ANSWERS}
        assert [other for other in ANSWERS if MATH.score(prompt_for(gold), responses[other])] == [gold]


def test_responses_with_a_label_are_counted_for_majorities():
    assert answer_of("math", "It has 4 wheels, so the answer is (C).") == answer_of("math", "\\boxed{C}") == "C"
    assert answer_of("math", "<think>Maybe the answer is (B)</think> The answer is C(10,3) = 120") == "120"


def test_boxes_in_boxes_take_neither_time_nor_memory():
    assert MATH.score(prompt_for("5"), "\\boxed{\\text{5 " + "a" * 10_000 + "!}}") == 0.0  # nor do units
    tracemalloc.start()
    assert last_box("\\boxed{" * 50_000) is None  # hours, if each were read to the end
    assert last_box("\\boxed{" * 50_000 + "1" + "}" * 50_000) == "1"  # 10 GB, if each were a text of its own
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert joined_boxes("\\boxed{1}, $\\boxed 2$ and \\boxed{\\frac{1}{\\boxed{3}}}") == "1, 2, \\frac{1}{\\boxed{3}}"


def test_reference_answers_that_cannot_be_parsed_are_found_before_the_run(tmp_path):
    answers = ["1", "$$", "\\$18.90", "\\boxed{}", "x^2"]
    file = write(tmp_path / "p.jsonl", [{"prompt": "?", "answer": answer} for answer in answers])
    with pytest.raises(UserError, match=r"p.jsonl, line 2: the answer '..' .*\n.*p.jsonl, line 4: ") as error:
        check_reward(recipe(file=file, kind="math"))
    assert "line 3" not in str(error.value) and "line 5" not in str(error.value)


def test_answers_of_a_suite_that_cannot_be_read_are_warned_of(tmp_path):
    """Gaokao as M2PO's authors publish it has two empty ones."""
    train = write(tmp_path / "p.jsonl", [{"prompt": "?", "answer": "1"}, {"prompt": "??", "answer": "2"}])
    answers = ["1", "", None, "$$", "x^2"]
    exam = write(tmp_path / "exam.jsonl", [{"prompt": "?", "answer": answer} for answer in answers])
    for kind, unread in (("math", 3), ("exact", 2)):
        found = recipe(file=train, kind=kind, evaluation={"suite": str(exam), "source": "file"})
        with pytest.warns(UserWarning, match=f"exam.jsonl: {unread} of its 5 answers cannot be read.*line 2"):
            check_reward(found)
    exam.write_text('{"prompt": "?", "answer": [1]}')  # not an answer at all
    with pytest.raises(UserError, match="answer must be"):
        check_reward(found)


def test_only_generators_have_a_reasoning_gym_scorer(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "?", "answer": "1"}])
    suite = {"source": "file", "suite": str(file)}
    for made in (recipe("chain_sum", heldout=1, evaluation=suite), recipe(file=file, kind="reasoning_gym")):
        with pytest.raises(UserError, match=r'"reasoning_gym" cannot score a file: .*p\.jsonl'):
            check_reward(made)
    check_reward(recipe("chain_sum", evaluation=suite | {"every": 0}))
