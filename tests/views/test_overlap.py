"""Repeated prompts, and training prompts that are also in an evaluation suite or share text with it."""

import itertools
import random

from megarl.views.prompts import overlapping, repeated


def sentence(seed, words):
    return " ".join(f"w{random.Random(f'{seed}/{n}').randrange(10**6)}" for n in range(words))


def test_prompts_are_the_same_whatever_their_case_and_spaces():
    assert repeated(["What is 2+2?", "what is  2+2?\n", "What is 2-2?", "WHAT IS 2+2?"]) == 2
    assert overlapping(["a + b", "c", "A  + B", "a - b"], ["a + b"]) == ([0, 2], [])


def test_thirteen_consecutive_words_are_an_overlap_and_twelve_are_not():
    asked = sentence("exam", 30)
    words = asked.split()
    twelve = " ".join(["before", *words[4:16], "after"])
    thirteen = " ".join(["before", *words[4:17], "after"])
    turned = " ".join(reversed(words))
    assert overlapping([twelve, thirteen, turned, asked, asked.upper()], [asked]) == ([3, 4], [1])
    assert overlapping([asked + " more"], [asked]) == ([], [0])
    assert overlapping(["short one"], ["a short one"]) == ([], [])


def test_overlaps_equal_those_found_by_comparing_every_pair_of_windows():
    """The texts are parts of one text; two of them are equal, share a window, or share fewer than 13 words."""
    rng = random.Random(0)
    whole = [rng.choice("ab") for _ in range(80)]
    texts = [whole[start : start + rng.randrange(10, 20)] for start in (rng.randrange(60) for _ in range(40))]
    train, exam = texts[:20], texts[20:]

    def windows(words):
        return [tuple(words[n : n + 13]) for n in range(len(words)) if n + 13 <= len(words)]

    expected = [
        n
        for n, words in enumerate(train)
        if words not in exam
        and any(x == y for other in exam for x, y in itertools.product(windows(words), windows(other)))
    ]
    exact, shared = overlapping([" ".join(words) for words in train], [" ".join(words) for words in exam])
    assert exact == [n for n, words in enumerate(train) if words in exam]
    assert shared == [n for n in expected if train[n] not in train[:n]]
    assert (len(exact), len(shared), len(expected)) == (3, 5, 6), "some of every kind, and one is repeated"


def test_an_instruction_that_many_prompts_share_is_no_overlap():
    instruction = sentence("instruction", 20)
    exam = [f"{instruction} {sentence('exam', 20)}"]
    for count, found in ((10, 10), (11, 0)):
        train = [f"{instruction} {sentence(n, 5)}" for n in range(count)]
        assert len(overlapping(train * 3, exam)[1]) == found, "repetitions count once"
    copied = f"{instruction} {sentence('exam', 13)}"
    assert overlapping([*train, copied], exam)[1] == [11]
