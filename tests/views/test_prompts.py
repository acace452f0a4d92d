"""`megarl data check` finds, before a run, the rows and settings at which the run would stop."""

import json

import pytest

from megarl import cli
from tests.data.prompt_sources import char_tokenizer, write
from tests.phases.commands import settings


@pytest.fixture
def check(tmp_path, capsys):
    """A function that checks a prompt file of given rows and returns the exit code and the output."""
    char_tokenizer(tmp_path / "model")

    def run(rows, *changes, exam=None, kind="math"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
        suite = "" if exam is None else f'suite = "{write(tmp_path / "exam.jsonl", exam)}"\n'
        path = tmp_path / "r.toml"
        path.write_text(
            f'[model]\npath = "{tmp_path}/model"\n[data]\nsource = "file"\ntrain = "{tmp_path}/p.jsonl"\n'
            f'max_prompt_tokens = 200\n[reward]\nkind = "{kind}"\n[eval]\nprompts = 2\n{suite}'
        )
        code = 0
        try:
            cli.main(["data", "check", str(path), *settings(*changes)])
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return run


def rows(count):
    return [{"prompt": f"{i} + 1 = ?", "answer": i + 1} for i in range(count)]


def test_good_rows_have_no_problems(check):
    """Repeated rows are counted, and columns that no prompt shows are named."""
    code, said = check([*rows(20), *rows(3)])
    assert code == 0 and said.endswith("no problems found\n")
    assert "p.jsonl: 23 prompts, 3 of them repetitions of others" in said
    assert "tokens: median 9, 99 % up to 10, longest 10" in said
    code, said = check([*rows(20), {"prompt": "1 + 1 = ?", "answer": 2, "image": "a.png"}])
    assert code == 0 and "columns that no prompt shows: image" in said


def test_ten_kinds_of_faults_in_one_file_are_all_named(check):
    """Also those behind a line that is no JSON, and answers that the verifier cannot read."""
    faults = {
        '{"prompt": "x", "ans': "line 5 is not JSON",
        '{"answer": 1}': "line 6: no column 'prompt'",
        '{"prompt": "x"}': "line 7: no column 'answer'",
        '{"prompt": "  ", "answer": 1}': "line 8: prompt must be a string",
        '{"prompt": "x", "answer": 0.1234567890123456789}': "line 9: answer has more digits",
        '{"prompt": "x", "answer": true}': "line 10: answer must be",
        '[{"prompt": "x"}]': "line 11: expected an object with prompt and answer, got list",
        '{"prompt": [{"role": "user", "content": null}], "answer": 1}': "line 12: message 1 of prompt must have a text",
        '{"prompt": "\\ud800", "answer": 1}': "line 13: not valid text",
        '{"prompt": "word?", "answer": "$$"}': "line 14: the answer '$$' of prompt 'word?' cannot be parsed",
        '{"prompt": "x", "answer": 1, "level": null}': "column level is null",
        json.dumps({"prompt": "1 " * 300, "answer": 1, "level": 1}): "1 prompts of",
    }
    good = [row | {"level": 1} for row in rows(4)]
    code, said = check([*good, *faults], "data.prompt_template={level} {prompt}")
    assert code == 1
    for named in faults.values():
        assert any(line.startswith("WRONG: ") and named in line for line in said.splitlines()), named


@pytest.mark.parametrize(("kind", "form"), [("math", r"\boxed{{{}}}"), ("exact", "{}"), ("dapo", "Answer: {}")])
def test_a_prompt_and_a_made_up_response_are_shown_with_its_score(check, kind, form):
    code, said = check(rows(20), kind=kind)
    question = said.partition("--- a prompt\n")[2].partition("\n")[0]
    assert code == 0 and question.endswith(" + 1 = ?")
    response = form.format(int(question.split()[0]) + 1)
    assert f"--- a response that is made up: score 1\n{response}\n" in said


def test_answers_are_judged_by_the_recipes_verifier(check):
    assert check([*rows(8), {"prompt": "word?", "answer": "$$"}], kind="exact")[0] == 0
    assert check([*rows(8), {"prompt": "grids?", "answer": "0 1\n2 3\n\n4"}])[0] == 0
    code, said = check([*rows(8), {"prompt": "f", "tests": ["assert f()"]}], kind="exact")
    assert code == 1 and "line 9: prompt 'f' has no answer to compare with" in said


@pytest.mark.parametrize(("overlong", "code", "fate"), [("error", 1, "the run would stop"), ("drop", 0, "left out")])
def test_overlong_prompts_are_counted_with_what_the_run_would_do(check, overlong, code, fate):
    long = [{"prompt": "1 " * 300, "answer": "1"}] * 2
    found, said = check([*rows(20), *long], f"data.overlong={overlong}")
    assert found == code
    assert "2 prompts of" in said and "more than data.max_prompt_tokens = 200: " in said and fate in said
    assert "longest 600" in said


def test_prompts_that_do_not_fit_the_template_are_counted(check):
    mixed = [{**row, "hint": "h"} for row in rows(4)] + rows(25)
    code, said = check(mixed, "data.prompt_template={hint} {prompt}")
    assert code == 1 and said.count("does not fit") == 20
    assert "WRONG: and 5 more prompts that do not fit the template" in said


def test_overlap_with_heldout_prompts_is_counted(check):
    story = "a train leaves the town at nine and meets another one at noon how fast was the first"
    exam = [{"prompt": story + "?", "answer": 1}, {"prompt": "two plus two", "answer": 4}]
    others = ("two plus two", "Two plus  two", f"once more: {story}?")
    code, said = check([*rows(20), *({"prompt": text, "answer": 4} for text in others)], exam=exam)
    assert code == 0
    assert (
        "2 held-out prompts: of the training files, 1 prompts are among them and are not trained on, 1 differ from "
        "one only in case or spaces\n  differs only in case or spaces: 'Two plus  two'\n"
    ) in said
