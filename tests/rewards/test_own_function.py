"""Mistakes in reward functions of the user's own: one line each, before any process where it can be known."""

import functools

import pytest

from megarl import cli
from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.rewards import python
from megarl.rewards.parts import check_reward
from megarl.rewards.pool import Limits
from megarl.storage.run_dir import RunDir
from tests.helpers import megarl
from tests.phases.commands import settings

HEAD = "def score(prompt, response, row):\n"
RIGHT = f'{HEAD}    return float(response.strip() == row["answer"])\n'


def reward(path, *more):
    return ["reward.kind=python", f"reward.path={path}:score", *more]


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    return path


FILES = {  # the whole file: what is said before the run begins
    "no file": (None, "there is no file"),
    "no function": ("def scores(prompt, response, row): return 1", "has no 'score'"),
    "arguments": ("def score(response): return 1", "score() takes 1 positional argument but 3 were given"),
    "not a function": ("score = 3", "'int' object is not callable"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3 (mine.py, line 1)"),
    "async": (f"async {RIGHT}", "coroutine object score at"),
}
BODIES = {  # or the function's body
    "column": ('return float(response == row["gold"])', "KeyError: 'gold' (mine.py, line 2)"),
    "range": ("return 3", "the score 3, but scores are from 0 to 1"),
    "nothing": ("pass", "returned a score or reward that is None; is a return missing?"),
    "empty": ("return response[0] == 1", "with response '': IndexError"),
    "no score": ('return {"reward": 1}', 'returned a dictionary without "score"'),
    "hard exit": ("import os; os._exit(0)", "ends its process on the first prompt"),
    "key": ('return {"scroe": 1}', "returned the key 'scroe'"),
    "not a number": ("return float('nan')", "that is "),
    "large": ('return {"score": 1, "reward": 1e308}', "expected a finite number"),
    "waits": ("import time; time.sleep(100)", "waits for more than 10 s without"),
    "several": ("import numpy; return numpy.ones(3)", "score or reward of several numbers"),
    "endless": ("while True: pass", "exceeds its limit (CPU time)"),
}


def test_rows_of_a_suite_may_lack_answers(recipe, own, tmp_path):
    (tmp_path / "exam.jsonl").write_text('{"prompt": "a", "answer": ""}\n')
    check_reward(load_recipe(recipe, reward(own, f"eval.suite={tmp_path}/exam.jsonl", "eval.source=file")))


@pytest.mark.parametrize("mistake", [*FILES, *BODIES])
def test_a_mistake_is_one_line_of_the_check_of_the_data_and_of_the_run(
    mistake, recipe, own, tmp_path, monkeypatch, capsys
):
    if mistake == "endless":
        monkeypatch.setattr(python, "Limits", functools.partial(Limits, seconds=0.5))
    if mistake == "waits":
        monkeypatch.setattr(python, "PATIENCE", 0.5)
    text, message = FILES[mistake] if mistake in FILES else BODIES[mistake]
    own.unlink() if text is None else own.write_text(text if mistake in FILES else f"{HEAD}    {text}\n")
    with pytest.raises(UserError) as found:
        check_reward(load_recipe(recipe, reward(own)))
    assert message in str(found.value) and "\n" not in str(found.value)
    if mistake == "column":
        run = megarl("train", recipe, "--run-dir", tmp_path / "run", *settings(*reward(own)))
        assert run.returncode == 2 and message in run.stderr and not (tmp_path / "run").exists()
        with pytest.raises(SystemExit) as checked:
            cli.main(["data", "check", str(recipe), *settings(*reward(own))])
        assert checked.value.code == 1 and message in capsys.readouterr().out


def test_the_prompt_has_its_template_before_the_run_too(recipe, own):
    own.write_text(RIGHT.replace("return", "assert prompt[-1] == '=' and 'word' not in row; return"))
    assert load_recipe(recipe).data.prompt_template == "{prompt}="
    check_reward(load_recipe(recipe, reward(own)))
    with pytest.raises(UserError, match="AssertionError"):  # an item of a generator is tried, too
        check_reward(load_recipe(recipe, reward(own, "data.source=reasoning_gym", "data.train=spell_backward")))


def test_numbers_of_numpy_and_torch_are_taken(recipe, own):
    for number in ("numpy.float32", "torch.tensor", "numpy.bool_"):
        own.write_text(f"import numpy, torch\n{RIGHT}".replace("float(", f"{number}("))
        check_reward(load_recipe(recipe, reward(own)))


def test_scores_of_a_declared_range_are_taken_and_others_refused(recipe, own):
    own.write_text(RIGHT.replace("float(", "3 * float("))
    check_reward(load_recipe(recipe, reward(own, "reward.scores=[-1, 3]", "reward.correct_above=2.5")))
    with pytest.raises(UserError, match="scores are from -1 to 2"):
        check_reward(load_recipe(recipe, reward(own, "reward.scores=[-1, 2]")))


LATE = """
def score(prompt, response, row):
    if response not in (row["answer"], "a response", ""):
        BODY
    return 1.0
"""


def test_what_only_a_models_response_shows_ends_with_exit_code_2_and_may_be_mended(recipe, own):
    """And responses over the verifier's limits are counted on the screen."""
    # the policy of the base model is not evaluated, so that nothing was scored when the function fails
    wanted = settings(*reward(own, "eval.every=0"))
    command = ["train", recipe, "--run-dir", own.parent / "run", "--until", "rollout:0", *wanted]
    own.write_text(LATE.replace("BODY", 'return row["gold"]'))
    failed = megarl(*command)
    assert failed.returncode == 2 and "KeyError: 'gold' (mine.py, line 4)" in failed.stderr
    assert "starting again may help" not in failed.stderr
    own.write_text(LATE.replace("BODY", 'memory = bytearray(8 << 30) if response[:1] == "b" else ""\n        return 0'))
    mended = megarl(*command)
    assert mended.returncode == 0, mended.stderr
    assert "responses scored 0 because the verifier reached its limits" in mended.stdout
    own.write_text(RIGHT)
    refused = megarl(*command)
    assert refused.returncode == 2 and f"the reward file {own} has changed" in refused.stderr


OBJECTIVE = """
from dataclasses import dataclass
from megarl.objectives import OBJECTIVES

@dataclass(frozen=True)
class Mine(OBJECTIVES["grpo"]):
    def terms(self, batch, statistics):
        if len(batch.logprobs) > 8:
            batch.logprobs[:4] + batch.logprobs[:5]
        return super().terms(batch, statistics)

    fused = False
"""


def test_an_objective_that_fails_in_training_ends_with_exit_code_2(recipe, own, tmp_path):
    """And a note, that the suite has fewer rows than prompts are asked for, is one line."""
    own.write_text(OBJECTIVE)
    (tmp_path / "exam.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    wanted = settings(f"objective.path={own}:Mine", "schedule.stages=1", f"eval.suite={tmp_path}/exam.jsonl")
    found = megarl("train", recipe, "--run-dir", tmp_path / "run", *wanted)
    assert found.returncode == 2 and "(mine.py, line 9)" in found.stderr
    assert RunDir.open(tmp_path / "run").stage(0).is_sealed()
    assert "megarl: note: evaluation uses only the 1 distinct prompts" in found.stdout + found.stderr
    assert "Warning" not in found.stderr and "prompts.py" not in found.stderr
