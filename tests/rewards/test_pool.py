"""What a response may cost: nothing but its own reward, whatever it says and whatever happens to the processes."""

import contextlib
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from megarl.data.prompts import Prompt, build_prompts
from megarl.errors import UserError
from megarl.recipe.tables import RewardTable
from megarl.rewards.exact import Exact
from megarl.rewards.math import Math
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, Verdict, VerifierPool
from tests.data.prompt_sources import char_tokenizer, recipe
from tests.rewards import hostile

TIGHT = Limits(seconds=0.5, memory=1 << 30, workers=2)
RIGHT = Verdict(1.0)


def asked(answer):
    return Prompt(0, "?", (1,), answer, {})


@contextlib.contextmanager
def pool(build, limits=TIGHT):
    verifiers = VerifierPool(build, limits)
    try:
        yield verifiers
    finally:
        verifiers.close()


def score(verifiers, questions):
    """The verdicts on (prompt, response) pairs, in their order."""
    numbers = [verifiers.ask(*question) for question in questions]
    found = {}
    while len(found) < len(numbers):
        found |= dict(verifiers.verdicts(wait=True))
    return [found[number] for number in numbers]


class Scripted:
    """Does what the response says."""

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
            case "pid":
                return float(os.getpid())
        return float(response == prompt.answer)


def workers(verifiers):
    return psutil.Process(verifiers._pid).children()


def wait_until(condition):
    while not condition():
        time.sleep(0.01)


def test_there_are_as_many_hostile_answers_as_were_found():
    assert (len(hostile.MATH), len(hostile.GENERATORS)) == (45, 38)
    assert len(set(hostile.MATH)) == 45


def test_hostile_mathematics_scores_0_and_stops_nobody():
    # the last, right one takes a tenth of that, and several times as much on a busy machine
    with pool(lambda: Math(RewardTable(kind="math")), replace(TIGHT, seconds=1.0)) as verifiers:
        verdicts = score(verifiers, [(asked("42"), text) for text in (*hostile.MATH, "so it is $42$")])
    *verdicts, last = verdicts
    assert [text for text, verdict in zip(hostile.MATH, verdicts, strict=True) if verdict.score] == []
    assert last == RIGHT
    assert sum(verdict.over is not None for verdict in verdicts) >= 5


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Generator -> one of its prompts, and the verifier."""
    tokenizer, found = char_tokenizer(tmp_path_factory.mktemp("tokenizer")), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        for generator in dict.fromkeys(name for name, _ in hostile.GENERATORS):
            settings = recipe(generator, heldout=1, max_prompt_tokens=10000)
            prompts = build_prompts(settings, tokenizer)
            found[generator] = prompts.train(0), build_verifier(settings, prompts)
    return found


def test_hostile_answers_to_generators_score_0_and_stop_nobody(sources):
    class Each:
        def score(self, prompt, response):
            return sources[prompt.entry["generator"]][1].score(prompt, response)

    questions = [(sources[generator][0], text) for generator, text in hostile.GENERATORS]
    right = sources["puzzle24"][0]
    with pool(Each) as verifiers:
        verdicts = score(verifiers, [*questions, (right, right.answer)])
    assert [
        question for question, verdict in zip(hostile.GENERATORS, verdicts, strict=False) if verdict.score > 0.9
    ] == []
    assert verdicts[-1].score >= 0.999
    assert sum(verdict.over is not None for verdict in verdicts) >= 5


def test_each_limit_costs_only_its_response():
    with pool(Scripted) as verifiers:
        bad, right = ["spin", "eat", "crash", "kill"], ["a"] * 40  # more than a message has
        texts = [text for one in bad for text in (*right, one, *right)]
        verdicts = score(verifiers, [(asked("a"), text) for text in texts])
    assert [verdict for text, verdict in zip(texts, verdicts, strict=True) if text == "a" and verdict != RIGHT] == []
    wrong = [verdict for text, verdict in zip(texts, verdicts, strict=True) if text != "a"]
    assert [verdict.over for verdict in wrong] == ["time", "memory", "died", "died"]
    assert {verdict.score for verdict in wrong} == {0.0}


def test_the_client_goes_on_meanwhile():
    with pool(Scripted, Limits(seconds=0.5, workers=2)) as verifiers:
        stuck = [verifiers.ask(asked("a"), "spin") for _ in range(2)]
        # more than any socket holds, to workers that read nothing
        numbers = [verifiers.ask(asked("a"), "a" * 1_000_000) for _ in range(20)]
        assert verifiers.verdicts() == []
        found = {}
        while len(found) < 22:
            found |= dict(verifiers.verdicts(wait=True))
        assert {found[number].over for number in stuck} == {"time"}
        assert {found[number] for number in numbers} == {Verdict(0.0)}
        assert verifiers.verdicts(wait=True) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_does_not_count_against_its_response(number):
    with pool(Scripted, Limits(seconds=30, patience=0.2, workers=1)) as verifiers:
        (first,) = score(verifiers, [(asked("a"), "pid")])
        worker = int(first.score)
        os.kill(worker, signal.SIGSTOP)
        question = verifiers.ask(asked("a"), "a")
        assert verifiers.verdicts() == []
        os.kill(worker, number)
        assert verifiers.verdicts(wait=True) == [(question, RIGHT)]
        assert worker not in [process.pid for process in workers(verifiers)]


def test_a_response_that_stops_each_of_its_workers_scores_0():
    with pool(Scripted, Limits(seconds=30, patience=0.2, workers=1)) as verifiers:
        assert score(verifiers, [(asked("a"), "sleep"), (asked("a"), "a")]) == [Verdict(0.0, "died"), RIGHT]


def test_mistakes_and_bugs_are_told():
    with pool(Exact) as verifiers, pytest.raises(UserError, match="has no answer to compare with"):
        score(verifiers, [(asked(""), "a")])
    with pool(Scripted) as verifiers, pytest.raises(RuntimeError, match=r"'\?' with response 'raise'[^$]*a bug"):
        score(verifiers, [(asked("a"), "raise")])

    def fail():
        raise UserError("nothing to build")

    with pool(fail) as verifiers, pytest.raises(UserError, match="nothing to build"):
        score(verifiers, [(asked("a"), "a")])
    with pool(Scripted) as verifiers:
        os.kill(verifiers._pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the process that supervises the verifiers ended"):
            score(verifiers, [(asked("a"), "a")])


def test_nothing_is_left_behind():
    with pool(Scripted, replace(TIGHT, seconds=3600)) as verifiers:  # so long that both spin at the same time
        score(verifiers, [(asked("a"), "a")])
        spinning = [verifiers.ask(asked("a"), "spin") for _ in range(2)]
        assert verifiers.verdicts() == []
        wait_until(lambda: len(workers(verifiers)) == len(spinning))
        started = [psutil.Process(verifiers._pid), *workers(verifiers)]
    assert [process for process in started if process.is_running()] == []
