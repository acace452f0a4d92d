"""A response can cost only its own reward, whatever it says and whatever happens to the pool's processes."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from megarl.errors import UserError
from megarl.heartbeats import FILE, read_beat
from megarl.rewards import Score
from megarl.rewards.pool import Limits
from tests.rewards import hostile
from tests.rewards.pooling import TIGHT, generated, pool, prompt_for, score, scorer

RIGHT, RIGHT_TEXT = Score(1.0), "so it is $42$"


class Scripted:
    """A verifier that does what the response says."""

    def score(self, prompt, response):
        match response:
            case "spin":
                while True:
                    pass
            case "eat":
                return float(len(bytearray(8 << 30)))
            case "crash":
                os.abort()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("a bug")
            case "sleep":
                time.sleep(3600)
        if response.startswith("wait for "):
            while not os.path.exists(response.removeprefix("wait for ")):
                time.sleep(0.01)
        return float(response == prompt.answer)


def test_an_answer_that_cannot_be_read_is_wrong_in_a_suite_and_a_mistake_in_training():
    with pool(lambda: scorer("math")) as verifiers:
        for answer in ("", "$$"):
            exam = replace(prompt_for(answer), entry={"exam": True})
            assert score(verifiers, [(exam, "\\boxed{2}"), (exam, "")]) == [Score(0.0)] * 2
        with pytest.raises(UserError, match="cannot be parsed"):
            score(verifiers, [(prompt_for("$$"), "\\boxed{2}")])


def workers(verifiers):
    return psutil.Process(verifiers._pid).children()


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["math", "reasoning_gym"])
def test_hostile_responses_are_wrong_and_a_right_one_after_them_is_right(kind):
    if kind == "math":
        verifier, last, limits = scorer("math"), (prompt_for("42"), RIGHT_TEXT), replace(TIGHT, seconds=0.1)
        assert verifier.score(*last) == 1.0  # what the first formula loads, workers inherit
        questions = [(prompt_for("42"), text) for text in hostile.MATH]
    else:
        prompts, verifier = generated(dict.fromkeys(name for name, _ in hostile.GENERATORS))
        questions = [(prompts[generator][0], text) for generator, text in hostile.GENERATORS]
        last, limits = (prompts["puzzle24"][0], prompts["puzzle24"][0].answer), TIGHT
    with pool(lambda: verifier, limits) as verifiers:
        *verdicts, right = score(verifiers, [*questions, last])
    assert [text for (_, text), verdict in zip(questions, verdicts, strict=True) if verdict.value > 0.9] == []
    assert right.value >= 0.999
    assert sum(verdict.over is not None for verdict in verdicts) >= 5


@pytest.mark.parametrize(
    ("bad", "over", "limits"),
    [
        (["spin"], ["time"], TIGHT),
        (["eat", "crash", "kill"], ["memory", "died", "died"], Limits(seconds=600, memory=1 << 30, workers=2)),
    ],
)
def test_a_response_that_exceeds_a_limit_costs_only_its_own_score(bad, over, limits):
    with pool(Scripted, limits) as verifiers:
        right = ["a"] * 40  # more than fit in a message
        texts = [text for one in bad for text in (*right, one, *right)]
        verdicts = score(verifiers, [(prompt_for("a"), text) for text in texts])
    assert [verdict for text, verdict in zip(texts, verdicts, strict=True) if text == "a" and verdict != RIGHT] == []
    wrong = [verdict for text, verdict in zip(texts, verdicts, strict=True) if text != "a"]
    assert [verdict.over for verdict in wrong] == over
    assert {verdict.value for verdict in wrong} == {0.0}


def test_the_client_never_waits_for_busy_workers(tmp_path):
    with pool(Scripted, Limits(workers=2)) as verifiers:
        for _ in range(2):
            verifiers.ask(prompt_for("a"), f"wait for {tmp_path / 'end'}")
        for _ in range(20):  # more than a socket's buffer holds, while the workers read nothing
            verifiers.ask(prompt_for("a"), "a" * 1_000_000)
        assert verifiers.verdicts() == []
        (tmp_path / "end").touch()
        found = {}
        while verdicts := verifiers.verdicts(wait=True):
            found |= dict(verdicts)
        assert found == dict.fromkeys(range(22), Score(0.0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_response_is_scored_again_if_its_worker_is_killed_or_stopped(number):
    with pool(Scripted, Limits(seconds=30, patience=1.0, workers=1)) as verifiers:
        score(verifiers, [(prompt_for("a"), "a")])
        worker = workers(verifiers)[0].pid
        os.kill(worker, signal.SIGSTOP)
        (question,) = verifiers.ask(prompt_for("a"), "a")
        assert verifiers.verdicts() == []
        os.kill(worker, number)
        assert verifiers.verdicts(wait=True) == [(question, RIGHT)]
        assert worker not in [process.pid for process in workers(verifiers)]


def test_a_response_that_stalls_each_of_its_workers_scores_0():
    with pool(Scripted, Limits(seconds=30, patience=1.0, workers=1)) as verifiers:
        assert score(verifiers, [(prompt_for("a"), "sleep"), (prompt_for("a"), "a")]) == [Score(0.0, "stuck"), RIGHT]


def beats_in(folder):
    return found.number if (found := read_beat(folder / "beats")) else 0


@pytest.mark.parametrize(("progress", "late"), [(600.0, 300.0), (0.6, 2.5)])
def test_a_long_scoring_shows_heartbeats_for_as_long_as_it_may_take(progress, late, tmp_path, monkeypatch):
    """After `Limits.progress` it shows none, as if it had stalled."""
    monkeypatch.setenv(FILE, str(tmp_path / "beats"))
    with pool(Scripted, Limits(seconds=30, patience=600, workers=1, progress=progress)) as verifiers:
        asked, begin = verifiers.ask(prompt_for("a"), "sleep"), time.monotonic()
        verifiers.verdicts(wait=True, unless=lambda: beats_in(tmp_path) >= 3 or time.monotonic() - begin > late)
        assert (beats_in(tmp_path) >= 3) == (progress == 600) and asked == range(1)


def test_mistakes_and_bugs_are_raised_in_the_client():
    with pool(lambda: scorer("exact")) as verifiers, pytest.raises(UserError, match="has no answer to compare with"):
        score(verifiers, [(prompt_for(""), "a")])
    with pool(Scripted) as verifiers, pytest.raises(RuntimeError, match=r"'\?' with response 'raise'[^$]*a bug"):
        score(verifiers, [(prompt_for("a"), "raise")])

    def fail():
        raise UserError("nothing to build")

    with pool(fail) as verifiers, pytest.raises(UserError, match="nothing to build"):
        score(verifiers, [(prompt_for("a"), "a")])
    with pool(Scripted) as verifiers:
        os.kill(verifiers._pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the process that supervises the verifiers ended"):
            score(verifiers, [(prompt_for("a"), "a")])


def test_a_closed_pool_leaves_no_process_behind():
    with pool(Scripted, replace(TIGHT, seconds=3600)) as verifiers:  # so that both spin at the same time
        score(verifiers, [(prompt_for("a"), "a")])
        spinning = [verifiers.ask(prompt_for("a"), "spin") for _ in range(2)]
        assert verifiers.verdicts() == []
        while len(workers(verifiers)) < len(spinning):
            time.sleep(0.01)
        started = [psutil.Process(verifiers._pid), *workers(verifiers)]
    assert [process for process in started if process.is_running()] == []
